"""Saved weights, and text that a model writes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable

import harness
import prepare
from harness.gpu import GPU
from prepare import PrepareError, Tokenizer, one_line


def save_weights(model, tokenizer: Tokenizer) -> None:
    """Writes weights in their own dtypes, config, and hashes of tokenizer and train.py. A full disk costs no run."""
    from safetensors.torch import save_file

    inner = getattr(model, "module", getattr(model, "_orig_mod", model))  # of an average of weights; compiled
    # copies, as the format refuses tensors that share memory
    state = {name: t.to("cpu", copy=True).contiguous() for name, t in inner.state_dict().items()}
    try:
        config = json.dumps(dataclasses.asdict(model.config))
        with prepare.new_file(harness.WEIGHTS) as file:
            about = {"config": config, "tokenizer": tokenizer.fingerprint.hex(), "train.py": train_py()}
            save_file(state, file.name, about)
            os.chmod(file.name, os.fstat(file.fileno()).st_mode)  # it writes another file, which nobody else may read
    except Exception as error:
        print(f"train.py: {harness.WEIGHTS.name} could not be written: {one_line(error)}", file=sys.stderr)


def load_weights(build_model: Callable, device, gpu: GPU, tokenizer: Tokenizer):
    """The model last saved with --save. Raises PrepareError if there is none, or it does not fit train.py."""
    from safetensors import safe_open

    if not harness.WEIGHTS.exists():
        raise PrepareError(f"no {harness.WEIGHTS.name} yet: run python train.py --save first")
    try:
        with safe_open(harness.WEIGHTS, "pt") as file:
            if file.metadata()["tokenizer"] != tokenizer.fingerprint.hex():
                raise ValueError("trained with another tokenizer")
            if file.metadata().get("train.py") not in (None, train_py()):
                print("train.py has changed since these weights were saved", file=sys.stderr)
            model = build_model(json.loads(file.metadata()["config"]), device, gpu)
            model.eval().load_state_dict({name: file.get_tensor(name) for name in file.keys()})
    except Exception as error:
        what = f"{harness.WEIGHTS.name} does not fit train.py and dataset ({one_line(error)})"
        raise PrepareError(f"{what}: run python train.py --save again") from None
    return model


def train_py() -> str:
    return hashlib.sha256(prepare.read(harness.RESULTS.with_name("train.py")).encode()).hexdigest()


def sample(model, tokenizer: Tokenizer, text: str, seed: int, tokens: int = 256) -> str:
    """`text` and its continuation, at temperature 0.8, up to the end of the document or `tokens` tokens."""
    import torch

    torch.manual_seed(seed)
    bos, seq_len, device = tokenizer.get_bos_token_id(), model.config.seq_len, next(model.parameters()).device
    ids = tokenizer.encode(text, prepend=bos)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # this shape is not compiled
        for _ in range(tokens):
            context = ids[-seq_len:]
            padded = context + [bos] * (seq_len - len(context))  # causal: no token sees the padding
            logits = model(torch.tensor([padded], device=device))[0, len(context) - 1]
            token = torch.multinomial(torch.softmax(logits / 0.8, -1), 1).item()
            if token == bos:
                break
            ids.append(token)
    return tokenizer.decode(ids[1:])
