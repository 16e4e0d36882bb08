"""Configuration: TOML files, `FUSION_*` environment variables and flags, decoded strictly."""
