#!/usr/bin/env python3
"""
An agent for `night loop` that needs no language model: it moves one constant of train.py, or makes an edit. So a
night can be tried out, and timed.

    python -m night loop --agent "$PWD/tests/bench/script_agent.py 40" --hours 2   # thinks for about 40 s
"""

import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import edits

from night.knobs import edit, read_knobs

EDITS = {f"without {name}": pair for name, pair in edits.EDITS.items()}
EDITS |= {
    "slope of LeakyReLU^2 0.3 -> 0.5": ("F.leaky_relu(x, 0.3)", "F.leaky_relu(x, 0.5)"),
    "MLP 4x -> 3x": ("self.experts else 4", "self.experts else 3"),
    "MLP 4x -> 5x": ("self.experts else 4", "self.experts else 5"),
    "5-grams, too": ("NGRAMS = (2, 3, 4)", "NGRAMS = (2, 3, 4, 5)"),
    "no QK-norm": ("rotate(norm(q), cos, sin), rotate(norm(k), cos, sin)", "rotate(q, cos, sin), rotate(k, cos, sin)"),
    "value embeddings in every block": ("gates = None, H\n        if i % 2 == 0", "gates = None, H\n        if True"),
    "x0 is not normalized": ("x = x0 = norm(x)", "x = x0 = x"),
    "Newton-Schulz: 5 -> 4 steps": ("    (2.346541, -1.709782, 0.423235),\n", ""),
    "cosine instead of linear decay": (
        "(1 - (1 - FINAL_LR) * progress)",
        "(FINAL_LR + (1 - FINAL_LR) * (1 + math.cos(math.pi * progress)) / 2)",
    ),
    "learning rates constant for a fifth": ("FINAL_LR) * progress)", "FINAL_LR) * max(0, progress - 0.2) / 0.8)"),
    "rates fall as 1 - sqrt(progress)": ("FINAL_LR) * progress)", "FINAL_LR) * progress**0.5)"),
    "an eighth of the MLP's input is from the token before": (
        "h = norm(x)\n",
        "h = norm(x)\n        n = h.size(-1) // 8\n"
        "        h = torch.cat([F.pad(h[..., :n], (0, 0, 1, -1)), h[..., n:]], -1)\n",
    ),
    "half of each value is from the token before": (
        "        y = self.attend(",
        "        v = torch.where(self.slow, F.pad(v, (0, 0, 0, 0, 1, -1)), v)\n        y = self.attend(",
    ),
    "values are normalized": ("        y = self.attend(", "        v = norm(v)\n        y = self.attend("),
    "attention's output is normalized": (
        "self.c_proj(y.flatten(2))",
        "self.c_proj(norm(y.flatten(2)))",
    ),
    "queries are shifted like keys": (
        "        y = self.attend(",
        "        q = torch.where(self.slow, F.pad(q, (0, 0, 0, 0, 1, -1)), q)\n        y = self.attend(",
    ),
    "half of the shifted half of a key is from two tokens before": (
        "        y = self.attend(",
        "        quarter = torch.arange(k.size(-1), device=k.device) % (k.size(-1) // 2) >= k.size(-1) * 3 // 8\n"
        "        k = torch.where(quarter, F.pad(k, (0, 0, 0, 0, 1, -1)), k)\n        y = self.attend(",
    ),
    "values add a tenth of the mean of all values so far": (
        "        y = self.attend(",
        "        steps = torch.arange(1, v.size(1) + 1, device=v.device).view(-1, 1, 1)\n"
        "        mean = (v.float().cumsum(1) / steps).to(v.dtype)\n"
        "        v = v + 0.1 * mean\n        y = self.attend(",
    ),
    "the last head is the mean of all values so far": (
        "        return self.c_proj(y.",
        "        steps = torch.arange(1, v.size(1) + 1, device=v.device).view(-1, 1, 1)\n"
        "        mean = (v[:, :, -1:].float().cumsum(1) / steps).to(y.dtype)\n"
        "        y = torch.cat([y[:, :, :-1], mean], 2)\n        return self.c_proj(y.",
    ),
    "the mean of the first hidden states so far is added": (
        "        x = x0 = norm(x)\n",
        "        x = x0 = norm(x)\n        x = x + 0.5 * norm(x0.float().cumsum(1)).to(x.dtype)\n",
    ),
    "full context one layer earlier": ("seq_len if i % 4 == 0", "seq_len if i % 4 == 1"),
    "full context two layers earlier": ("seq_len if i % 4 == 0", "seq_len if i % 4 == 2"),
    "a document's first token is no target": (
        "loss = model(x, y) / grad",
        "loss = model(x, torch.where(y == config.vocab_size - 4, -1, y)) / grad",
    ),
    "induction by 2 tokens": ("ngram_hash(idx, 3).sort", "ngram_hash(idx, 2).sort"),
    "induction by 4 tokens": ("ngram_hash(idx, 3).sort", "ngram_hash(idx, 4).sort"),
    "Adam's first beta 0.8 -> 0.9": ("ADAM_BETAS = (0.8, ", "ADAM_BETAS = (0.9, "),
    "Adam's second beta 0.98 -> 0.99": ("ADAM_BETAS = (0.8, 0.98)", "ADAM_BETAS = (0.8, 0.99)"),
    "tables' second moment 0.8 -> 0.9": ("0.8, half_lr", "0.9, half_lr"),
    "queries, keys and values are one matrix to Muon": ("(self.qkv, -2), config.fp8)", "fp8=config.fp8)"),
    "the MLP's first matrix is one to Muon": ("C**-0.5, (C, -2), fp8)", "C**-0.5, fp8=fp8)"),
    "the MLP's second matrix is one to Muon": ("C, 0, (C, -1), fp8)", "C, 0, fp8=fp8)"),
    "n-gram tables' rates fall linearly, too": ('if group.get("kind") == "rows":  # by', "if False:  # by"),
}


def propose(source: bytes, prompt: str) -> tuple[str, bytes]:
    """A description and a train.py that, by the prompt, nobody has tried."""
    for what in random.sample([*EDITS], len(EDITS)) if random.random() < 0.5 else ():
        old, new = (text.encode() for text in EDITS[what])
        if what not in prompt and source.count(old) == 1:
            return what, source.replace(old, new)
    knobs = read_knobs(source)
    while True:
        knob = random.choice(knobs)
        at, low, high = random.random(), knob.low, knob.high
        drawn = knob.fit(low * (high / low) ** at if knob.log else low + at * (high - low))
        what = f"{knob.name} {knob.text} -> {knob.literal(drawn)}"
        if drawn != knob.value and what not in prompt:
            return what, edit(source, {knob: drawn})


def main() -> None:
    time.sleep(random.uniform(0.5, 1.5) * float(sys.argv[1]))
    path = Path("train.py")
    what, text = propose(path.read_bytes(), sys.stdin.read())
    Path("IDEA").write_text(what)
    path.write_bytes(text)


if __name__ == "__main__":
    main()
