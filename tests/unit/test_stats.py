import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

import kvlab
from kvlab.stats import mcnemar, paired_bootstrap, prompts_needed, stratified_bootstrap

pytestmark = pytest.mark.unit

EXPERIMENTS = 1000
RESAMPLES = 1000


def binary_scores(rng, prompts):
    """Prompts differ in difficulty, so that the two set-ups agree on most; b is right 3 points less often."""
    difficulty, luck_a, luck_b = rng.random((3, prompts))
    skill = 0.1 + 0.8 * difficulty
    return (luck_a < skill).astype(float), (luck_b < skill - 0.03).astype(float)


def skewed_scores(rng, prompts):
    shared = rng.lognormal(0, 0.5, prompts)
    return shared, 0.9 * shared + rng.exponential(0.1, prompts)


def clustered_scores(rng, prompts):
    """Four runs of each question; the questions differ in what the change does to them."""
    skill = 0.1 + 0.8 * rng.random(prompts)
    moved = np.clip(skill + rng.normal(0.02, 0.1, prompts), 0, 1)
    return tuple((rng.random((prompts, 4)) < p[:, None]).astype(float) for p in (skill, moved))


def mean_clip():
    """E[clip(0.1 + 0.8 U + N(0.02, 0.1), 0, 1)] − 0.5, by quadrature over both."""
    skill = 0.1 + 0.8 * (np.arange(2000) + 0.5) / 2000
    noise = scipy_stats.norm.ppf((np.arange(2000) + 0.5) / 2000, 0.02, 0.1)
    return np.clip(skill[:, None] + noise, 0, 1).mean() - 0.5


TRUTH = {
    binary_scores: -0.03,
    skewed_scores: -0.1 * math.exp(0.5**2 / 2) + 0.1,
    clustered_scores: mean_clip(),
}


@pytest.mark.parametrize("prompts", [40, 150])
@pytest.mark.parametrize("draw", TRUTH, ids=lambda draw: draw.__name__)
def test_a_95_percent_interval_holds_the_truth_in_93_to_97_percent_of_experiments(draw, prompts):
    rng = np.random.default_rng(20261130)
    truth, held = TRUTH[draw], 0
    for seed in range(EXPERIMENTS):
        _, low, high = paired_bootstrap(*draw(rng, prompts), n_resamples=RESAMPLES, seed=seed)
        held += low <= truth <= high
    assert 0.93 <= held / EXPERIMENTS <= 0.97


def test_the_interval_of_several_tasks_covers_too():
    rng = np.random.default_rng(20261130)
    truth, held = (TRUTH[binary_scores] + TRUTH[skewed_scores]) / 2, 0
    for seed in range(EXPERIMENTS):
        pairs = [binary_scores(rng, 60), skewed_scores(rng, 30)]
        _, low, high = stratified_bootstrap(pairs, n_resamples=RESAMPLES, seed=seed)
        held += low <= truth <= high
    assert 0.93 <= held / EXPERIMENTS <= 0.97


def test_runs_of_a_question_are_no_questions_of_their_own():
    rng = np.random.default_rng(0)
    a, b = (np.repeat(scores[:, None], 4, axis=1) for scores in binary_scores(rng, 100))
    together, apart = paired_bootstrap(a, b), paired_bootstrap(a.ravel(), b.ravel())
    assert together == paired_bootstrap(a[:, 0], b[:, 0])
    # Four equal runs hold no more than one: taken apart they would look like four times the data.
    assert (together.high - together.low) / (apart.high - apart.low) == pytest.approx(2, rel=0.1)


def test_the_interval_of_many_prompts_is_the_normal_one():
    a, b = skewed_scores(np.random.default_rng(0), 5000)
    difference, low, high = paired_bootstrap(a, b)
    error = (b - a).std() / 5000**0.5
    assert difference == pytest.approx((b - a).mean())
    # Monte Carlo noise of an end: sqrt(p (1 − p) / resamples) / density, 0.027 standard errors; four of them.
    assert [low, high] == pytest.approx([difference - 1.96 * error, difference + 1.96 * error], abs=0.11 * error)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(*[st.floats(-1e3, 1e3)] * 2), min_size=2, max_size=30), st.integers(0, 3))
def test_swapping_turns_the_sign_and_seeds_repeat(pairs, seed):
    a, b = np.array(pairs).T
    one = paired_bootstrap(a, b, n_resamples=200, seed=seed)
    assert one == paired_bootstrap(a, b, n_resamples=200, seed=seed)
    other = paired_bootstrap(b, a, n_resamples=200, seed=seed)
    assert (other.difference, other.low, other.high) == pytest.approx((-one.difference, -one.high, -one.low))
    # Rounding of means of numbers up to 2e3.
    assert one.low - 1e-9 <= one.high


def test_another_seed_is_another_interval():
    scores = skewed_scores(np.random.default_rng(0), 50)
    assert paired_bootstrap(*scores, seed=1) != paired_bootstrap(*scores, seed=2)


@pytest.mark.parametrize("shift", [0, 0.25])
def test_constant_differences_are_their_own_interval(shift):
    a = np.array([0.5, 1.0, 0.25, 0.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert paired_bootstrap(a, a + shift) == (shift, shift, shift)
        assert stratified_bootstrap([(a, a + shift), (a, a)]) == (shift / 2,) * 3


def test_a_constant_task_beside_another():
    a, b = binary_scores(np.random.default_rng(0), 50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both = stratified_bootstrap([(a, b), (a, a)])
    alone = paired_bootstrap(a, b)
    assert both.difference == pytest.approx(alone.difference / 2)
    assert (both.high - both.low) * 2 == pytest.approx(alone.high - alone.low, rel=0.15)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([1], [0], "a has 1 prompt; accepted: at least 2"),
        ([], [], r"a has shape \[0\]"),
        ([1, 0], [1, 0, 1], r"b has shape \[3\]; accepted: that of a, \[2\]"),
        ([[1, 0], [0, 1]], [1, 0], r"b has shape \[2\]"),
        ([1, math.nan], [1, 0], "a has a score that is not finite"),
        ([1, 0], [1, math.inf], "b has a score that is not finite"),
        ([1, "x"], [1, 0], "a has scores that are no float64 numbers"),
        ([1, 10**400], [1, 0], "a has scores that are no float64 numbers"),
        ([1, 1.7e308], [1, -1.7e308], r"a has a score of magnitude 1\.7e\+308; accepted: 1e\+150 at most"),
        ([[1, 0], [1]], [1, 0], "rows of unequal length"),
        (1, 0, r"a has shape \[\]"),
    ],
)
def test_scores_that_are_refused(a, b, message):
    for function in (paired_bootstrap, mcnemar):
        with pytest.raises((ValueError, TypeError), match=message):
            function(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"level": 1}, "level is 1"), ({"n_resamples": 0}, "n_resamples is 0"), ({"seed": -1}, "seed is -1")],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        paired_bootstrap([1, 0, 1], [0, 0, 1], **options)


def test_a_seed_is_checked_where_nothing_is_drawn():
    with pytest.raises(TypeError, match="seed is 'x'; accepted"):
        paired_bootstrap([1, 1], [1, 1], seed="x")


@pytest.mark.parametrize("pairs", [5, [5], [([1, 0], [0, 1], [1, 1])]])
def test_what_is_no_pairs_is_refused(pairs):
    with pytest.raises(TypeError, match=r"pairs is a (int|list); accepted: pairs \(a, b\)"):
        stratified_bootstrap(pairs)


def test_no_task_is_refused():
    with pytest.raises(ValueError, match="pairs has no task"):
        stratified_bootstrap([])


def test_mcnemar_is_the_sum_of_binomial_tails():
    a = [1] * 9 + [0] * 2 + [1] * 20
    b = [0] * 9 + [1] * 2 + [1] * 20
    tail = sum(math.comb(11, k) for k in range(3)) / 2**11
    assert mcnemar(a, b) == (9, 2, pytest.approx(2 * tail))
    assert mcnemar(b, a)[:2] == (2, 9)
    assert mcnemar(a, a) == (0, 0, 1.0)


def test_mcnemar_wants_one_binary_run():
    with pytest.raises(ValueError, match="b has scores other than 0 and 1"):
        mcnemar([1, 0], [1, 0.5])
    with pytest.raises(ValueError, match="accepted: one run"):
        mcnemar([[1, 0], [1, 0]], [[1, 0], [1, 0]])


def test_so_many_prompts_see_the_difference_in_four_of_five_experiments():
    rng = np.random.default_rng(0)
    prompts = prompts_needed(0.1, 0.5)
    differences = rng.normal(0.1, 0.5, (4000, prompts))
    seen = np.abs(differences.mean(axis=1)) > 1.96 * differences.std(axis=1, ddof=1) / prompts**0.5
    # Four standard errors of a share of 0.8 over 4,000 experiments.
    assert seen.mean() == pytest.approx(0.8, abs=4 * (0.8 * 0.2 / 4000) ** 0.5)


def test_prompts_needed_grow_with_the_square():
    assert prompts_needed(-0.1, 0.5) == prompts_needed(0.1, 0.5) == 197
    assert prompts_needed(0.01, 0.5) == pytest.approx(100 * 196.2, rel=1e-3)
    assert prompts_needed(0.1, 0) == 2
    for arguments, message in (
        ((0, 1), "difference is 0"),
        ((1, -1), "deviation is -1"),
        ((math.nan, 1), "difference"),
        ((1e-300, 1), r"difference is 1e-300 beside a deviation of 1\.0; accepted: one that at most 9e\+15 prompts"),
        ((1e-300, 1e308), "difference is 1e-300"),
    ):
        with pytest.raises(ValueError, match=message):
            prompts_needed(*arguments)
    with pytest.raises(ValueError, match="power is 1"):
        prompts_needed(0.1, 0.5, power=1)


def test_it_is_a_name_of_the_library():
    assert kvlab.paired_bootstrap is paired_bootstrap
