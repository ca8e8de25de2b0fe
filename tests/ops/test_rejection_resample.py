"""`rejection_resample` without initial shares, which are estimated from the elements so far."""

import numpy as np
import pytest

from daskdist import Dataset


def resampled(build_class, number=20_000, target=(0.5, 0.5), **arguments):
    ds = Dataset.range(number).rejection_resample(build_class, list(target), seed=1, **arguments)
    return np.array([int(number) for number, _ in ds])


def told(caplog):
    return [record.getMessage() for record in caplog.records if "rejection_resample" in record.getMessage()]


def test_a_wrong_estimate_of_the_shares_is_logged(caplog):
    shares = np.bincount(resampled(lambda x: int(x >= 15_000))) / 20_000
    assert shares[0] > 2 * shares[1]
    (message,) = told(caplog)
    assert "the shares 75.0%, 25.0% instead of 50.0%, 50.0%" in message
    assert message.endswith("shuffle it before, or give initial_dist=[0.75, 0.25]")
    # The advice in the message works.
    caplog.clear()
    classes = resampled(lambda x: int(x >= 15_000), initial_dist=[0.75, 0.25])
    assert abs(classes.mean() - 0.5) < 0.02
    assert told(caplog) == []


@pytest.mark.parametrize(
    ("build_class", "number", "target"),
    [
        (lambda x: int(x % 10 == 0), 20_000, (0.5, 0.5)),
        (lambda x: int(x % 3), 5000, (0.2, 0.3, 0.5)),
        (lambda x: int(x > 5), 10, (0.5, 0.5)),
        (lambda x: 0, 100, (1.0, 0.0)),
        (lambda x: 0, 0, (0.5, 0.5)),
    ],
)
def test_right_shares_and_chance_deviations_are_not_logged(build_class, number, target, caplog):
    for _ in range(2):
        resampled(build_class, number, target)
    assert told(caplog) == []


def test_wrong_shares_are_logged_once_in_each_pass(caplog):
    ds = Dataset.range(20_000).rejection_resample(lambda x: int(x >= 15_000), [0.5, 0.5], seed=1)
    list(ds)
    assert len(told(caplog)) == 1
    list(ds.take(10))
    assert len(told(caplog)) == 1


def test_a_class_without_elements_is_named(caplog):
    assert len(resampled(lambda x: 0, 100)) == 100
    (message,) = told(caplog)
    assert message.startswith("rejection_resample: no element is of class 1, of which target_dist has a share")
