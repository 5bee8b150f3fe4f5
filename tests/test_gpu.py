"""Claims about harness.pick_gpu: what an experiment gets to know of the GPU."""

import sys
from types import SimpleNamespace

import pytest
import torch
from sympy import Integer
from torch._functorch import config as aot_autograd
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V

import harness
import prepare

DATASHEETS = {"T4": 65, "V100": 125, "L4": 121, "RTX3060": 25.5, "RTX3090": 71, "RTX4090": 165, "A100": 312}
DATASHEETS |= {"H100": 989.5, "H200": 989.5, "B200": 2250}


@pytest.mark.parametrize("name", harness.GPUS)
def test_peak_flops_are_the_datasheets_dense_tflops(name):
    assert harness.named_gpu(name).peak_flops == pytest.approx(DATASHEETS[name] * 1e12, rel=0.01)


def test_gpus_of_one_capability_differ_by_multiprocessors_and_by_being_a_geforce():
    assert harness.peak_flops((8, 6), 84, 1740, False) == pytest.approx(149.7e12, rel=0.01)  # an A40


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with that GPU, and with a flash_attn_interface.py of that text."""

    def put(name: str, capability: tuple, multiprocessors: int, mhz: int, memory=16 * 10**9, fa3="") -> None:
        properties = dict(zip(("major", "minor"), capability, strict=True), name=name, total_memory=memory)
        properties |= dict(multi_processor_count=multiprocessors, clock_rate=1000 * mhz)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(**properties))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
        (tmp_path / "flash_attn_interface.py").unlink(missing_ok=True)
        if fa3:
            (tmp_path / "flash_attn_interface.py").write_text(fa3)

    return put


def test_the_gpu_that_is_there_is_found(machine):
    machine("Tesla T4", (7, 5), 40, 1590)
    device, gpu = harness.pick_gpu()
    assert device.type == "cuda" and gpu.peak_flops == pytest.approx(65e12, rel=0.01)
    assert (gpu.capability, gpu.memory, gpu.has_fa3) == ((7, 5), 16 * 10**9, False)
    machine("NVIDIA GeForce RTX 3090", (8, 6), 82, 1695)
    assert harness.pick_gpu()[1].peak_flops == pytest.approx(71e12, rel=0.01)
    machine("NVIDIA Rubin", (11, 0), 200, 2000)  # of which we know nothing
    assert harness.pick_gpu()[1].peak_flops > 400e12 and harness.gpu_name() == "NVIDIA Rubin"


FLASH = "def flash_attn_func(): pass"


@pytest.mark.parametrize("fa3", [FLASH, ""], ids=["FA3", "no FA3"])
def test_a_named_gpu_lends_its_size_and_its_numerics_where_this_one_can(machine, fa3):
    machine("NVIDIA H200", (9, 0), 132, 1980, 141 * 10**9, fa3)
    assert harness.pick_gpu("T4")[1] == harness.GPU((7, 5), 40 * 1590e6 * 1024, int(14.6 * 2**30), False)
    assert harness.pick_gpu("A100")[1].has_fa3 is False
    assert harness.pick_gpu("B200")[1] == harness.named_gpu("B200")._replace(capability=(9, 0), has_fa3=bool(fa3))
    assert harness.pick_gpu("H100")[1].has_fa3 == harness.pick_gpu()[1].has_fa3 == bool(fa3)
    assert harness.pick_gpu("cpu") == (torch.device("cpu"), harness.GPU(None, 0.0, 0, False))


def test_a_hopper_without_fa3_is_another_kind_of_gpu_and_says_how_to_get_it(machine, capsys):
    install = "pip install flash-attn-3 --index-url https://download.pytorch.org/whl/cu130"
    for fa3, name in ((FLASH, "NVIDIA H200"), ("", "NVIDIA H200, without FA3")):
        machine("NVIDIA H200", (9, 0), 132, 1980, fa3=fa3)
        assert harness.gpu_name() == harness.gpu_name(", 60 s") == harness.gpu_name(" as H100") == name
        assert harness.gpu_name(" as T4, 60 s") == harness.gpu_name(" as cpu") == "NVIDIA H200"
        harness.pick_gpu()
        assert (install in capsys.readouterr().out) == (not fa3)
    machine("NVIDIA B200", (10, 0), 148, 1965, fa3=FLASH)
    assert not harness.pick_gpu()[1].has_fa3 and not harness.this_gpu().has_fa3
    assert harness.gpu_name() == "NVIDIA B200" and not capsys.readouterr().out


def test_the_name_of_the_gpu_does_not_import_fa3_and_a_broken_one_ends_the_run_with_the_remedy(machine):
    machine("NVIDIA H200", (9, 0), 132, 1980, fa3="raise OSError('undefined symbol: _ZN3c10')")
    assert harness.gpu_name() == "NVIDIA H200" and harness.pick_gpu()[1].has_fa3
    with pytest.raises(prepare.PrepareError, match=r"undefined symbol.*pip install flash-attn-3.*pip uninstall"):
        harness.load_fa3()
    machine("NVIDIA H200", (9, 0), 132, 1980, fa3=FLASH)
    assert harness.load_fa3().__name__ == "flash_attn_func"


def test_without_a_gpu_a_named_one_lends_its_size(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert harness.pick_gpu() == (torch.device("cpu"), harness.GPU(None, 0.0))
    assert harness.pick_gpu("H100")[1] == harness.named_gpu("H100")._replace(capability=None)
    assert harness.gpu_name() == "cpu"


def test_an_amd_gpu_is_refused_with_what_runs(machine, monkeypatch):
    machine("AMD Instinct MI300X", (9, 4), 304, 2100)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(prepare.PrepareError, match="use --gpu cpu"):
        harness.pick_gpu()


def test_a_short_row_that_inductor_is_unsure_of_is_read_once(monkeypatch):
    monkeypatch.setattr(AsyncCompile, "warm_pool", lambda: None)
    monkeypatch.setattr(AsyncCompile, "wakeup", lambda: None)
    default = InductorChoices.should_use_persistent_reduction
    monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", staticmethod(default))  # restored later

    def in_one_pass(hint: ReductionHint, length: int) -> bool:
        features = SimpleNamespace(get_reduction_hint=lambda: hint, reduction_numel=Integer(length))
        with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):
            return InductorChoices.should_use_persistent_reduction(features, False)

    assert not in_one_pass(ReductionHint.DEFAULT, 128)
    changed = {"triton.autotune_pointwise": True, "shape_padding": True}
    changed |= {"test_configs.force_filter_reduction_configs": False}
    with (
        config.patch(changed),  # restored, too
        aot_autograd.patch(autograd_cache_allow_custom_autograd_functions=False),
    ):
        harness.start_compiler()
        assert config.test_configs.force_filter_reduction_configs, "or reductions have up to four"
        assert aot_autograd.autograd_cache_allow_custom_autograd_functions, "or sum_rows is compiled anew each time"
    assert in_one_pass(ReductionHint.DEFAULT, 128) and in_one_pass(ReductionHint.DEFAULT, 1024)
    assert in_one_pass(ReductionHint.INNER, 768)
    assert not in_one_pass(ReductionHint.DEFAULT, 2048) and not in_one_pass(ReductionHint.OUTER, 128)
