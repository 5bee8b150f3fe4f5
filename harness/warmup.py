"""What comes before the clock: compiler settings, and a first step that compiles the model."""

from __future__ import annotations

import dataclasses
import functools
import gc
import getpass
import itertools
import os
import re
from collections.abc import Callable

from harness import referee


def warm_up(model, step: Callable) -> None:
    """Compiles the model: one call of step(loader) on random tokens, then predictions that must not see the future. If
    memory runs out, halves device_batch_size and tries again. Restores buffers and RNG state, but not the weights:
    reinitialize them."""
    import torch

    device, dtype = next(model.parameters()).device, getattr(model, "dtype", torch.float32)
    print(f"{num_params(model) / 1e6:.1f} M parameters, {dtype}, {model.config}", flush=True)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        while True:
            config = model.config
            try:
                draw = functools.partial(torch.randint, config.vocab_size, device=device)
                tokens = draw((config.device_batch_size, config.seq_len))
                step(itertools.repeat((tokens, tokens, 0)))
                model.zero_grad()
                referee.check(model, draw(referee.eval_shape(config)), config.vocab_size)  # waits for the device
                break
            except RuntimeError as error:
                if not is_out_of_memory(error) or config.device_batch_size == 1:
                    raise
            gc.collect()
            sequences = config.total_batch_size // config.seq_len
            smaller = next(b for b in range(config.device_batch_size // 2, 0, -1) if sequences % b == 0)
            model.config = dataclasses.replace(config, device_batch_size=smaller)
            model.zero_grad()
            print(f"Out of memory: device batch reduced to {smaller} sequences, total batch unchanged")
    model.zero_grad()
    for name, buffer in buffers.items():
        model.get_buffer(name).copy_(buffer)


def is_out_of_memory(error: BaseException) -> bool:
    """GPU or host memory. If cuBLAS or cuDNN cannot allocate its workspace, the error is a plain RuntimeError."""
    said = re.search("out of memory|can't allocate memory|ALLOC_FAILED", str(error))
    return bool(said) or isinstance(error, MemoryError)


def num_params(model) -> int:
    return sum(p.numel() for p in model.parameters())


def start_compiler() -> None:
    """Starts Inductor's workers while the model is built, and overrides six PyTorch defaults.

    By default, Inductor benchmarks several configurations of short reductions, pointwise kernels and padded GEMMs: 9 s
    of start-up on an H200 for no speed. It also reads RMSNorm's rows several times when the same kernel flips or sums
    them: 3% of a step (both measured). AOTAutograd does not cache graphs with custom autograd functions. And Dynamo
    gives up after eight shapes, more of which Muon meets if layers differ in width.
    """
    try:
        getpass.getuser()  # Inductor names its cache folder after the user; torch 2.11 needs a name
    except (KeyError, OSError):  # a container's uid without an entry in /etc/passwd
        os.environ.setdefault("USER", str(os.getuid()))
    from torch._dynamo import config as dynamo
    from torch._functorch import config as aot_autograd
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    AsyncCompile.warm_pool()
    AsyncCompile.wakeup()
    config.triton.autotune_pointwise = config.shape_padding = False
    dynamo.recompile_limit = 64
    config.test_configs.force_filter_reduction_configs = True  # as in deterministic mode
    aot_autograd.autograd_cache_allow_custom_autograd_functions = True
    default = InductorChoices.should_use_persistent_reduction

    def in_one_pass(features, cooperative_reduction: bool) -> bool:
        unsure = features.get_reduction_hint() == ReductionHint.DEFAULT and not cooperative_reduction
        short = V.graph.sizevars.statically_known_leq(features.reduction_numel, 1024)
        return (unsure and short) or default(features, cooperative_reduction)

    InductorChoices.should_use_persistent_reduction = staticmethod(in_one_pass)
