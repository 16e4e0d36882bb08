"""Models and data of your own, as `--model` and `--data` take them."""
