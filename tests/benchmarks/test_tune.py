"""Timings of launches are read back, and constants are fitted to them."""

import csv
import json
from itertools import islice

import pytest

from mla_backend.plan import Launch
from serving_benchmarks.__main__ import main
from serving_benchmarks.ops import tune

GPU = {"multiprocessors": 20, "hopper": 1, "clusters": [0, 20, 10, *[0] * 14], "clock_ghz": 1.5, "memory_tbs": 1.0}


@pytest.fixture
def timings(tmp_path):
    """Of a GPU that takes as long as the model says with constants that are half as large again."""
    model, lines = tune.Model(GPU), []
    constants = 1.5 * tune.current_constants("a GPU")
    for size in islice(tune.random_sizes(), 6):
        taken = model.weigh(size, constants)
        lines += [(*size, *launch, us) for us, launch in zip(taken, model.launches(), strict=False)]
    with (tmp_path / "timings.csv").open("w", newline="") as file:
        file.write(f"# a GPU\n# {json.dumps(GPU)}\n")
        csv.writer(file).writerows([(*tune.Size._fields, *Launch._fields, "us"), *lines])
    return tmp_path / "timings.csv"


def test_a_fit_makes_the_model_choose_what_is_fast(timings):
    read, start = tune.Timings(timings), tune.current_constants("a GPU")
    fitted = tune.fit(read, start, 1)
    assert len(read.measured) == 6 and read.loss(fitted) < read.loss(start)
    assert max(read.regrets(1.5 * start).values()) < 1e-6 and max(read.regrets(fitted).values()) < 0.05
    table = f"kGpuCosts[] = {{\n{tune.as_entry(read, fitted)}}};\n"
    assert tune.split_constants_table(table)["a GPU"] == pytest.approx(fitted, rel=1e-3)


def test_measuring_needs_a_place_for_the_timings(capsys):
    assert main(["ops", "tune"]) == 2 and "--output FILE" in capsys.readouterr().err
