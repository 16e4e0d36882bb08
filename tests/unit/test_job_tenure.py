from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from hypothesis.strategies import booleans, integers, sampled_from

from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.job import tenure as tenures
from fusion_p2p.job.tenure import (
    OWNER_SILENT_S,
    Asked,
    Begin,
    Build,
    BuildFailed,
    Built,
    Claim,
    Drop,
    Ended,
    GoOn,
    Heard,
    Phase,
    SayPrepared,
    SayRefused,
    StartAsked,
    Tenure,
    Tick,
)

OWNER, OTHER = PeerId("owner"), PeerId("other")
CLAIM = Claim(OWNER, JobId("1" * 32), 1, 1)
NEXT = Claim(OWNER, CLAIM.job, 1, 2)
STRANGER = Claim(OTHER, JobId("2" * 32), 1, 1)


def drive(state: Tenure, *events: tenures.Event, now: float = 0.0) -> tuple[Tenure, list[tenures.Action]]:
    actions: list[tenures.Action] = []
    for event in events:
        state, new = tenures.step(state, event, now)
        actions += new
    return state, actions


def test_ask_build_start() -> None:
    _, actions = drive(Tenure(), Asked(CLAIM), Built(CLAIM), StartAsked(CLAIM), StartAsked(CLAIM))
    assert actions == [Build(CLAIM), SayPrepared(CLAIM), Begin(CLAIM, again=False), Begin(CLAIM, again=True)]


def test_a_peer_serves_one_job_at_a_time_and_says_so() -> None:
    state, _ = drive(Tenure(), Asked(CLAIM))
    same, actions = drive(state, Asked(STRANGER))
    assert same == state
    assert actions == [SayRefused(STRANGER, "serving another job (11111111)")]


def test_a_stranger_cannot_take_over_a_run_whose_job_it_knows() -> None:
    state, _ = drive(Tenure(), Asked(CLAIM), Built(CLAIM), StartAsked(CLAIM))
    thief = Claim(OTHER, CLAIM.job, 99, 99)
    same, actions = drive(state, Asked(thief), Ended(thief, "mine now"))
    assert same == state
    assert [type(action) for action in actions] == [SayRefused]


def test_a_newer_epoch_replaces_what_was_promised_and_an_older_one_does_not() -> None:
    state, _ = drive(Tenure(), Asked(CLAIM), Built(CLAIM))
    newer, actions = drive(state, Asked(NEXT))
    assert actions == [Drop(CLAIM, "replaced by a newer epoch", keep=True), Build(NEXT)]
    assert isinstance(drive(newer, Asked(CLAIM))[1][0], SayRefused)


def test_a_running_epoch_goes_on_until_its_successor_is_started() -> None:
    running, _ = drive(Tenure(), Asked(CLAIM), Built(CLAIM), StartAsked(CLAIM))
    prepared, actions = drive(running, Asked(NEXT, beside=True), Built(NEXT))
    assert actions == [Build(NEXT), SayPrepared(NEXT)]
    assert prepared.running == CLAIM
    started, actions = drive(prepared, StartAsked(NEXT))
    assert actions == [Drop(CLAIM, "followed by a newer epoch"), Begin(NEXT, again=False)]
    assert started == Tenure(Phase.RUNNING, NEXT, OWNER_SILENT_S)


def test_without_its_successor_an_epoch_runs_as_before() -> None:
    running, _ = drive(Tenure(), Asked(CLAIM), Built(CLAIM), StartAsked(CLAIM))
    preparing, _ = drive(running, Asked(NEXT, beside=True))
    refused, actions = drive(preparing, BuildFailed(NEXT, "too large"))
    assert (refused, actions) == (running, [SayRefused(NEXT, "too large"), GoOn(CLAIM)])
    aborted, actions = drive(preparing, Built(NEXT), Ended(NEXT, "somebody refused"))
    assert (aborted, actions[1:]) == (running, [Drop(NEXT, "somebody refused"), GoOn(CLAIM)])
    assert drive(aborted, StartAsked(NEXT))[1] == [SayRefused(NEXT, "this epoch was not prepared here")]


def test_the_end_of_a_running_epoch_is_the_end_of_its_successor() -> None:
    state, _ = drive(Tenure(), Asked(CLAIM), Built(CLAIM), StartAsked(CLAIM), Asked(NEXT, beside=True), Built(NEXT))
    assert drive(state, Ended(CLAIM, "stopped")) == (Tenure(), [Drop(CLAIM, "stopped"), Drop(NEXT, "stopped")])
    later = Claim(OWNER, CLAIM.job, 2, 3)
    assert drive(state, Asked(later, beside=True))[1] == [
        Drop(CLAIM, "replaced by a newer epoch", keep=True), Drop(NEXT, "replaced by a newer epoch", keep=True), Build(later)
    ]  # fmt: skip


def test_a_failed_build_is_refused_with_its_reason_and_the_peer_is_free() -> None:
    state, actions = drive(Tenure(), Asked(CLAIM), BuildFailed(CLAIM, "needs 3.1 GiB more"))
    assert actions[-1] == SayRefused(CLAIM, "needs 3.1 GiB more")
    assert state == Tenure()


def test_a_silent_owner_is_given_up_and_a_word_from_it_prolongs() -> None:
    state, _ = drive(Tenure(), Asked(CLAIM), Built(CLAIM), StartAsked(CLAIM))
    state, _ = drive(state, Heard(OWNER), Heard(OTHER), now=20.0)
    assert drive(state, Tick(), now=20.0 + OWNER_SILENT_S - 1)[1] == []
    state, actions = drive(state, Tick(), now=20.0 + OWNER_SILENT_S)
    assert [(type(action), action.keep) for action in actions if isinstance(action, Drop)] == [(Drop, True)]
    assert state.phase is Phase.IDLE


def test_only_the_owner_of_the_claim_ends_it() -> None:
    state, _ = drive(Tenure(), Asked(CLAIM))
    assert drive(state, Ended(STRANGER, "x"))[1] == []
    assert drive(state, Ended(CLAIM, "done"))[1] == [Drop(CLAIM, "done")]


class TenureMachine(RuleBasedStateMachine):
    """Whatever arrives, what is built and not dropped is one claim, or one that runs and one beside; nothing unbuilt runs."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.now = Tenure(), 0.0
        self.held: set[Claim] = set()
        self.built: set[Claim] = set()
        self.running: set[Claim] = set()

    claims = sampled_from([CLAIM, NEXT, STRANGER, Claim(OWNER, CLAIM.job, 1, 3), Claim(OWNER, CLAIM.job, 2, 1)])

    def feed(self, event: tenures.Event) -> None:
        self.state, actions = tenures.step(self.state, event, self.now)
        for action in actions:
            match action:
                case Build(claim):
                    self.held.add(claim)
                case Drop(claim):
                    self.held.discard(claim)
                    self.running.discard(claim)
                case SayRefused(claim) if isinstance(event, BuildFailed):
                    self.held.discard(claim)
                case Begin(claim):
                    assert claim in self.held & self.built
                    self.running.add(claim)
                case GoOn(claim):
                    assert self.running == self.held == {claim}

    @rule(claim=claims, beside=booleans())
    def ask(self, claim: Claim, beside: bool) -> None:
        self.feed(Asked(claim, beside))

    @rule(claim=claims)
    def build(self, claim: Claim) -> None:
        if claim in self.held:
            self.built.add(claim)
        self.feed(Built(claim))

    @rule(claim=claims)
    def fail(self, claim: Claim) -> None:
        if claim not in self.built:
            self.feed(BuildFailed(claim, "no"))

    @rule(claim=claims)
    def start(self, claim: Claim) -> None:
        self.feed(StartAsked(claim))

    @rule(claim=claims)
    def end(self, claim: Claim) -> None:
        self.feed(Ended(claim, "done"))

    @rule(seconds=integers(1, 40))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.feed(Tick())

    @invariant()
    def held_is_claimed(self) -> None:
        assert self.held == set(self.state.claims)
        assert len(self.running) <= 1
        if len(self.held) == 2:
            assert self.running == {self.state.running}


TestTenureMachine = TenureMachine.TestCase
TestTenureMachine.settings = settings(deadline=None, derandomize=True, max_examples=100, stateful_step_count=30)
