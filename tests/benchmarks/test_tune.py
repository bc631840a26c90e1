"""Timings of launches are read back, and constants are fitted to them."""

import csv
import json

import numpy as np
import pytest

from mla_backend.plan import Launch
from serving_benchmarks.ops import tune

GPU = {"multiprocessors": 20, "hopper": 1, "clusters": [0, 20, 10, *[0] * 14], "clock_ghz": 1.5, "memory_tbs": 1.0}


def test_a_fit_makes_the_model_choose_what_is_fast(tmp_path):
    model, lines, start = tune.Model(GPU), [], next(iter(tune.constants_in(tune.CONSTANTS.read_text()).values()))
    true = start * np.random.default_rng(0).uniform(0.5, 2, len(start))
    for size in tune.random_sizes(20):
        taken = model.weigh(size, true)
        lines += [(*size, *launch, us) for us, launch in zip(taken, model.launches(size), strict=True)]
    with (tmp_path / "timings.csv").open("w", newline="") as file:
        file.write(f"# a GPU\n# {json.dumps(GPU)}\n")
        csv.writer(file).writerows([(*tune.Size._fields, *Launch._fields, "us"), *lines])
    read = tune.Timings(tmp_path / "timings.csv")
    fitted = tune.fit(read, start, 1)
    assert len(read.measured) == 20 and read.loss(fitted) < read.loss(start)
    wrong, right = (sum(read.regrets(one).values()) for one in (start, fitted))
    assert sum(read.regrets(true).values()) < 1e-6 and right < wrong / 2
    table = f"kGpuCosts[] = {{\n{tune.as_entry(read, fitted)}}};\n"
    assert tune.constants_in(table)["a GPU"] == pytest.approx(fitted, rel=1e-3)
