"""What tunes itself compiles its configurations before it times them, and times the same ones."""

from types import SimpleNamespace

import pytest
from triton import Config
from triton.runtime.autotuner import Autotuner

from benchmarks.tuning import compile_side_by_side


@pytest.fixture
def configs(monkeypatch):
    found = [Config({"BK": n}, num_warps=w) for n, w in ((16, 2), (32, 4))]
    monkeypatch.setattr(Autotuner, "prune_configs", lambda self, kwargs: found)
    compile_side_by_side(2)
    return found


def kernel(run):
    name = SimpleNamespace(__name__="some_kernel")
    return SimpleNamespace(fn=SimpleNamespace(run=run), nargs={"x_ptr": 1, "n": 2}, base_fn=name)


def test_each_is_compiled_and_none_is_launched(configs):
    ran = []
    tuned = kernel(lambda *args, **kwargs: ran.append((args, kwargs)))
    given = {"grid": (3,), "warmup": False}
    assert Autotuner.prune_configs(tuned, given) is configs
    assert [args for args, _ in ran] == [(1, 2)] * 2
    assert [(k["BK"], k["num_warps"]) for _, k in ran] == [(16, 2), (32, 4)]
    assert all(k["warmup"] and k["grid"] == (3,) for _, k in ran) and not given["warmup"]


def test_one_that_does_not_compile_is_left_to_the_tuner(configs, capsys):
    def run(*args, **kwargs):
        raise RuntimeError("no such layout")

    assert Autotuner.prune_configs(kernel(run), {"grid": (1,)}) is configs
    assert "some_kernel is compiled one by one: RuntimeError('no such layout')" in (
        capsys.readouterr().out
    )
