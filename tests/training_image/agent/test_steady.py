"""Which of the steps that rank 0 shows are steady, and what they add up to."""

from agent.steady import MOST_SAMPLES, SETTLE_STEPS, SteadySteps
from job_contract.node_files import MEASURED_STEPS, RankProgress

FIRST = 101 + SETTLE_STEPS + MEASURED_STEPS


def shown(step, step_ms=20.0, state="running", **more):
    fields = {"loss": 2.0, "tokens_per_s": 100.0, "world_size": 4, "started": True, "data_wait_ms": 1.0, "comm_ms": 2.0}
    return RankProgress(step=step, state=state, step_ms=step_ms, **{**fields, **more})


def looked(*progress, steady=None):
    steady = steady or SteadySteps()
    for one in progress:
        steady.look(one, saving=False)
    return steady


def test_the_first_steps_after_a_start_are_left_out():
    steady = looked(*(shown(step, step_ms=900.0) for step in range(101, FIRST)))
    assert steady.take() is None
    told = looked(shown(FIRST), steady=steady).take()
    assert (told.steps, told.world_size, told.step_ms, told.data_wait_ms, told.comm_ms) == (10, 4, 20.0, 1.0, 2.0)


def test_samples_do_not_overlap_and_are_told_once_as_their_median():
    steady = looked(shown(101), *(shown(FIRST + step, step_ms=10.0 + step) for step in range(31)))
    told = steady.take()
    assert (told.steps, told.step_ms) == (40, 25.0)
    assert steady.take() is None


def test_steps_beside_a_save_are_left_out_and_so_are_those_just_after_it():
    steady = looked(shown(101), shown(FIRST))
    steady.take()
    for step in range(FIRST + 5, FIRST + 100, 5):
        steady.look(shown(step, step_ms=90.0), saving=True)
    after = FIRST + 100
    # The first that is new may be from before the end of the save, and what stands still says nothing.
    looked(shown(after, step_ms=90.0), shown(after, step_ms=90.0), steady=steady)
    looked(*(shown(after + step, step_ms=90.0) for step in range(1, 11)), steady=steady)
    assert steady.take() is None
    assert looked(shown(after + 11), steady=steady).take().step_ms == 20.0


def test_a_state_that_is_no_training_disturbs_and_waiting_for_data_does_not():
    for state, samples in (("evaluating", 0), ("saving", 0), ("waiting_for_data", 10)):
        steady = looked(shown(101), shown(FIRST - 1, state=state), shown(FIRST + 1))
        assert (told.steps if (told := steady.take()) else 0) == samples


def test_an_image_that_does_not_measure_its_steps_tells_of_none():
    steady = looked(*(shown(step, step_ms=None) for step in range(1, 500)))
    assert (steady.take(), steady.line(1, 9.0)) == (None, None)


def test_the_line_beside_the_curve_is_about_the_whole_attempt():
    steady = looked(*(shown(1 + 10 * number, mfu=0.4 + number / 1000) for number in range(12)))
    steady.take()
    steady.saw_memory([0.5, 0.61])
    steady.saw_memory([0.6])
    steady.saw_memory([])
    line = steady.line(3, 9.0)
    assert (line["attempt"], line["step"], line["at"], line["gpu_memory"]) == (3, 111, 9.0, 0.61)
    assert (line["steady"]["steps"], line["steady"]["tokens_per_s"], line["mfu"]) == (100, 100.0, 0.4065)


def test_memory_that_is_seen_before_the_first_steps_says_nothing():
    steady = looked(shown(1))
    steady.saw_memory([0.1])
    assert steady.memory_share is None


def test_a_long_attempt_keeps_a_bounded_number_of_samples_and_counts_its_steps():
    steady = looked(*(shown(1 + 10 * number) for number in range(3 * MOST_SAMPLES + 2)))
    assert len(steady._all) < MOST_SAMPLES
    assert abs(steady.line(1, 9.0)["steady"]["steps"] - 30_000) <= 40
    assert steady.take().steps == 10 * MOST_SAMPLES
