"""Claims about harness.pick_gpu: what an experiment gets to know of the GPU."""

import getpass
import importlib
import os
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from reference_model import sliding_attention
from small_corpus import ROOT
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
import train

# Driver's name, compute capability, multiprocessors, MHz, dense 16-bit TFLOP/s with fp32 accumulation by datasheet
CHIPS = {
    "T4": ("Tesla T4", (7, 5), 40, 1590, 65),
    "V100": ("Tesla V100-SXM2-16GB", (7, 0), 80, 1530, 125),
    "L4": ("NVIDIA L4", (8, 9), 58, 2040, 121),
    "A10": ("NVIDIA A10", (8, 6), 72, 1695, 125),
    "A40": ("NVIDIA A40", (8, 6), 84, 1740, 149.7),
    "L40": ("NVIDIA L40", (8, 9), 142, 2490, 181),
    "L40S": ("NVIDIA L40S", (8, 9), 142, 2520, 362),
    "RTX 3060": ("NVIDIA GeForce RTX 3060", (8, 6), 28, 1777, 25.5),
    "RTX 3090": ("NVIDIA GeForce RTX 3090", (8, 6), 82, 1695, 71),
    "RTX 4090": ("NVIDIA GeForce RTX 4090", (8, 9), 128, 2520, 165),
    "RTX 5090": ("NVIDIA GeForce RTX 5090", (12, 0), 170, 2407, 209.5),
    "RTX PRO 6000": ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 188, 2597, 500),
    "A100": ("NVIDIA A100-SXM4-40GB", (8, 0), 108, 1410, 312),
    "H20": ("NVIDIA H20", (9, 0), 78, 1980, 148),
    "H100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 1980, 989.5),
    "H200": ("NVIDIA H200", (9, 0), 132, 1980, 989.5),
    "B200": ("NVIDIA B200", (10, 0), 148, 1965, 2250),
    "B300": ("NVIDIA B300 SXM6 AC", (10, 3), 148, 1965, 2250),  # its clock is a guess
    "Orin": ("Orin", (8, 7), 16, 1300, 42.5),
    "Thor": ("NVIDIA Thor", (11, 0), 20, 1575, 259),
}
FLASH = "def flash_attn_func(): pass"
FA4 = """
import torch

def _flash_attn_fwd(q, k, v, causal, window_size_left, return_lse):
    assert causal and return_lse
    probabilities = attend(q, k, window_size_left)
    out = torch.einsum("bhts,bshd->bthd", probabilities, v.float()).to(q.dtype)
    return out, q.new_zeros(len(q), q.size(2), q.size(1), dtype=torch.float32), None

def _flash_attn_bwd(q, k, v, out, grad, lse, causal, window_size_left):
    probabilities, (q, k, v, grad) = attend(q, k, window_size_left), (t.float() for t in (q, k, v, grad))
    scores = probabilities * torch.einsum("bthd,bshd->bhts", grad, v)
    scores = (scores - probabilities * scores.sum(-1, keepdim=True)) / q.size(-1) ** 0.5
    grads = [torch.einsum("bhts,bshd->bthd", scores, k), torch.einsum("bhts,bthd->bshd", scores, q)]
    grads += [torch.einsum("bhts,bthd->bshd", probabilities, grad)]
    return *(g.to(out.dtype) for g in grads), None

def attend(q, k, left):
    back = torch.arange(q.size(1))[:, None] - torch.arange(q.size(1))
    seen = (back >= 0) & (back <= (q.size(1) if left is None else left))
    scores = torch.einsum("bthd,bshd->bhts", q.float(), k.float()) / q.size(-1) ** 0.5
    return scores.masked_fill(~seen, float("-inf")).softmax(-1)
"""


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with that GPU, with a flash_attn_interface.py of that text, and with FlashAttention-4 or without."""

    def put(name: str, capability: tuple, multiprocessors: int, mhz: int, memory=16 * 10**9, fa3="", fa4=False) -> None:
        properties = SimpleNamespace(
            name=name, major=capability[0], minor=capability[1], total_memory=memory, clock_rate=1000 * mhz,
            multi_processor_count=multiprocessors,
        )  # fmt: skip
        for question, answer in dict(
            is_available=True, get_device_properties=properties, get_device_capability=capability,
            get_device_name=name, mem_get_info=(memory, memory), get_arch_list=["sm_70", "sm_80", "compute_90"],
        ).items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, question, lambda answer=answer: answer)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
        (tmp_path / "flash_attn_interface.py").unlink(missing_ok=True)
        if fa3:
            (tmp_path / "flash_attn_interface.py").write_text(fa3)
        if fa4:
            install_fa4(tmp_path, FA4)

    return put


def install_fa4(folder, text: str) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[module]
    (folder / "flash_attn/cute").mkdir(parents=True, exist_ok=True)
    (folder / "flash_attn/cute/__init__.py").touch()
    (folder / "flash_attn/cute/interface.py").write_text(text)
    importlib.invalidate_caches()


@pytest.mark.parametrize("chip", CHIPS)
def test_each_gpu_is_found_with_the_peak_flops_of_its_datasheet_and_no_line_doubts_them(chip, machine, capsys):
    name, capability, *properties, tflops = CHIPS[chip]
    machine(name, capability, *properties, fa3=FLASH, fa4=True)
    device, gpu = harness.pick_gpu()
    flash = {9: "fa3", 10: "fa4"}.get(capability[0], "")
    assert (device.type, gpu.capability, gpu.memory, gpu.flash) == ("cuda", capability, 16e9, flash)
    assert gpu.peak_flops == pytest.approx(tflops * 1e12, rel=0.015)
    assert capsys.readouterr().out == "" and harness.gpu_name() == name and harness.this_gpu() == gpu
    if chip.replace(" ", "") in harness.GPUS:
        named = harness.named_gpu(chip.replace(" ", ""))
        assert (named.capability, named.peak_flops) == (capability, gpu.peak_flops)


@pytest.mark.parametrize("page", ["README.md", "docs/gpus.md"])
def test_each_gpu_in_the_tables_gets_the_row_it_is_in(page, machine):
    """Layers, width and experts of `--gpu`'s GPUs, and of others as their driver reports them."""
    table = re.search(r"^\| GPU \| numerics.*?\n\n", (ROOT / page).read_text(), re.M | re.S)[0].strip()
    found = set()
    for line in table.splitlines()[2:]:
        gpus, size = line.split("|")[1], line.split("|")[3]
        depth, width, experts = re.fullmatch(r" (\d+) x (\d+)(?:, (?:\d of )?(\d+) experts)? ", size).groups(0)
        for chip in re.sub(r"\(.*?\)", "", gpus).split(","):
            if chip.strip() not in ("none", "no GPU"):
                machine(*CHIPS[chip.strip()][:-1], memory=10**12)
                size = train.pick_size(harness.this_gpu())
                found.add(chip.strip())
                assert (size.depth, size.n_embd, size.num_experts) == (int(depth), int(width), int(experts)), chip
    assert {name.replace("RTX", "RTX ") for name in harness.GPUS} <= found, "--gpu names more"


def test_an_unknown_gpu_is_taken_for_a_relative_and_a_clock_of_zero_for_a_usual_one(machine, capsys, monkeypatch):
    machine("NVIDIA B400", (10, 7), 200, 2000)
    assert harness.pick_gpu()[1].peak_flops == harness.peak_flops((10, 3), 200, 2000)
    out = capsys.readouterr().out
    assert "Unknown GPU NVIDIA B400 (compute capability 10.7, 2000 MHz), taken for compute capability 10.3, 2000" in out
    machine("Tesla T4", (7, 5), 40, 0)
    assert harness.pick_gpu()[1].peak_flops == pytest.approx(61e12, rel=0.01)
    assert "taken for compute capability 7.5, 1500 MHz, 61 TFLOP/s: --gpu NAME overrides" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (4 * 2**30, 16 * 2**30))
    harness.pick_gpu("T4")  # one that is named is known
    assert capsys.readouterr().out == "Others use 12.0 of this GPU's 16.0 GiB: memory may run out\n"


CUDA13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "architectures", "hip", "compiler", "refusal"),
    [
        ((6, 0), CUDA13, None, "/bin/cc", r"\(6, 0\) is below 7.0.*--gpu cpu"),  # Triton does not know it
        ((7, 0), CUDA13, None, "/bin/cc", r"no kernels for compute capability .*whl/cu126"),
        ((8, 6), CUDA13, None, "/bin/cc", None),
        ((12, 1), CUDA13, None, "/bin/cc", None),
        ((8, 6), ["sm_75", "sm_90"], None, "/bin/cc", "no kernels for compute capability .*the newest"),
        ((9, 4), CUDA13, "6.2", "/bin/cc", "use --gpu cpu"),  # AMD's
        ((7, 5), CUDA13, None, "", "needs a C compiler on a GPU: install gcc, or set CC"),
    ],
)
def test_a_gpu_that_cannot_run_names_the_remedy_and_is_not_asked_for_cpu(
    capability, architectures, hip, compiler, refusal, machine, monkeypatch
):
    """A question would take memory of the GPU, which no fork of this process could use any more."""
    machine("some GPU", capability, 80, 1500)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: architectures)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(prepare.PrepareError, match=refusal) if refusal else nullcontext():
        harness.pick_gpu()
    assert harness.this_gpu().peak_flops > 0
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)
    assert harness.pick_gpu("cpu") == (torch.device("cpu"), harness.GPU(None, 0.0, 0, ""))


@pytest.mark.parametrize("fa3", [FLASH, ""], ids=["FA3", "no FA3"])
def test_a_named_gpu_lends_its_size_and_its_numerics_where_this_one_can(machine, fa3, monkeypatch):
    machine("NVIDIA H200", (9, 0), 132, 1980, 141 * 10**9, fa3)
    assert harness.pick_gpu("T4")[1] == harness.GPU((7, 5), 40 * 1590e6 * 1024, int(14.6 * 2**30), "")
    flash = "fa3" if fa3 else ""
    assert harness.pick_gpu("A100")[1].flash == ""
    assert harness.pick_gpu("B200")[1] == harness.named_gpu("B200")._replace(capability=(9, 0), flash=flash)
    assert harness.pick_gpu("H100")[1].flash == harness.pick_gpu()[1].flash == flash
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert harness.pick_gpu() == (torch.device("cpu"), harness.GPU(None, 0.0))
    assert harness.pick_gpu("H100")[1] == harness.named_gpu("H100")._replace(capability=None)
    assert harness.gpu_name() == "cpu" and harness.gpu_name("T4") == "cpu as T4"


FA3_INSTALL = "pip install flash-attn-3 --index-url https://download.pytorch.org/whl/cu130"


@pytest.mark.parametrize(
    ("chip", "kind", "install"), [("H200", "FA3", FA3_INSTALL), ("B200", "FA4", "pip install 'flash-attn-4[cu13]'")]
)
def test_a_gpu_without_its_flash_attention_is_another_kind_and_names_the_remedy(chip, kind, install, machine, capsys):
    for there in (False, True):
        machine(*CHIPS[chip][:-1], fa3=FLASH * (there or kind == "FA4"), fa4=there)
        name = CHIPS[chip][0]
        assert [harness.gpu_name(other) for other in ("T4", "cpu")] == [f"{name} as T4", f"{name} as cpu"]
        name += f", without {kind}" * (not there)
        assert harness.gpu_name() == name and harness.gpu_name(chip) == f"{name} as {chip}"
        assert harness.pick_gpu()[1].flash == harness.pick_gpu("H100")[1].flash == (kind.lower() if there else "")
        assert (install in capsys.readouterr().out) == (not there)


def test_a_broken_fa3_counts_as_installed_and_ends_the_run_with_the_remedy(machine):
    machine("NVIDIA H200", (9, 0), 132, 1980, fa3="raise OSError('undefined symbol: _ZN3c10')")
    assert harness.gpu_name() == "NVIDIA H200" and harness.pick_gpu()[1].flash == "fa3"
    with pytest.raises(prepare.PrepareError, match=r"undefined symbol.*pip install flash-attn-3.*pip uninstall"):
        harness.load_fa3()
    machine("NVIDIA H200", (9, 0), 132, 1980, fa3=FLASH)
    assert harness.load_fa3().__name__ == "flash_attn_func"


def test_fa4_compiles_and_one_that_disagrees_with_a_mask_ends_the_run_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    install_fa4(tmp_path, FA4)
    flash = harness.load_fa4()
    qkv = torch.randn(3, 2, 40, 2, 8).requires_grad_()
    for left in (7, 40):
        expected = sliding_attention(*qkv, left)
        grad = torch.randn_like(expected)
        expected = expected, *torch.autograd.grad(expected, qkv, grad)
        compiled = torch.compile(flash, fullgraph=True, backend="aot_eager")
        found = compiled(*qkv, causal=True, window_size=(left, 0))
        torch.testing.assert_close((found, *torch.autograd.grad(found, qkv, grad)), expected)
    remedy = r"reinstall it \(pip install flash-attn-4\) or remove it \(pip uninstall flash-attn-4\)"
    for old, new, why in (
        ("attend(q, k, window_size_left)", "attend(q, k, 90)", "differs from a mask by 0"),
        ("g.to(", "1.1 * g.to(", "by 0.1"),
        ("causal,", "is_causal,", "cannot be used .*argument .causal"),
    ):
        install_fa4(tmp_path, FA4.replace(old, new))
        with pytest.raises(prepare.PrepareError, match=f"{why}.*{remedy}"):
            harness.load_fa4()


def test_inductors_cache_folder_needs_no_entry_in_etc_passwd(monkeypatch):
    """Older torch raises KeyError there."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "pwd", SimpleNamespace(getpwuid=lambda uid: {}[uid]))
    monkeypatch.setattr(AsyncCompile, "warm_pool", lambda: 1 / 0)  # no more of it
    with pytest.raises(ZeroDivisionError):
        harness.start_compiler()
    assert getpass.getuser() == str(os.getuid())


def test_a_short_row_that_inductor_is_unsure_of_is_read_once(monkeypatch):
    monkeypatch.setattr(AsyncCompile, "warm_pool", lambda: None)
    monkeypatch.setattr(AsyncCompile, "wakeup", lambda: None)
    default = InductorChoices.should_use_persistent_reduction
    monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", staticmethod(default))  # restored later

    def in_one_pass(hint: ReductionHint, length: int) -> bool:
        features = SimpleNamespace(
            get_reduction_hint=lambda: hint, reduction_numel=Integer(length), strict_sum_rblock=lambda: None
        )
        with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):
            return InductorChoices.should_use_persistent_reduction(features, False)

    assert not in_one_pass(ReductionHint.DEFAULT, 128)
    changed = {"triton.autotune_pointwise": True, "shape_padding": True}
    changed |= {"test_configs.force_filter_reduction_configs": False}
    caching = aot_autograd.patch(autograd_cache_allow_custom_autograd_functions=False)
    with config.patch(changed), caching:  # restored, too
        harness.start_compiler()
        assert config.test_configs.force_filter_reduction_configs, "or reductions have up to four"
    assert in_one_pass(ReductionHint.DEFAULT, 1024) and in_one_pass(ReductionHint.INNER, 768)
    assert not in_one_pass(ReductionHint.DEFAULT, 2048) and not in_one_pass(ReductionHint.OUTER, 128)
