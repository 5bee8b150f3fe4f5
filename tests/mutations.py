"""Small bugs of the kind that a careless edit makes: which of them do the tests not notice?

    python tests/mutations.py                # all, about ten minutes; JOBS=8 in the environment: eight at a time
    python tests/mutations.py Muon "clock.t" # those that contain one of these, in the name of their part or in the text
    python tests/mutations.py --check        # only whether each old text occurs exactly once

Each bug replaces a text in a copy of the repository, where pytest then runs until the first failure. Exit status 1 if a
bug survives or an entry is stale. No part of the test suite.
"""
# ruff: noqa: E501

import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 300  # seconds; a bug that makes a test hang is noticed, too

MODEL = ["test_reference_model.py"]
OPTIMIZER = ["test_reference_optimizer.py"]
WIRING = ["test_wiring.py"]
METRIC = ["test_prepare.py", "-k", "bpb or target or eval_mode"]
CLOCK = ["test_harness.py", "-k", "clock or budget or loss"]
LOADER = ["test_prepare.py", "-k", "batch or epoch or order or window or loader or borders"]
LOG = ["test_harness.py", "-k", "row or keep or log or status or kept or subject or git"]

# (What it is in, file, tests: a file in tests/, perhaps with pytest's -k): pairs of an exact old text and a new one
SECTIONS = [
    ("The model", "train.py", MODEL, [
        ("torch.cat([angles.sin(), -angles.sin()], -1)", "torch.cat([-angles.sin(), angles.sin()], -1)"),
        ("inverse_freq = ROPE_BASE **", "inverse_freq = 10_000 **"),
        ("torch.linspace(0, 1, config.head_dim // 2 + 1)[:-1]", "torch.linspace(0, 1, config.head_dim // 2)"),
        ("rotate(norm(q), cos, sin)", "rotate(q, cos, sin)"),
        ("rotate(norm(k), cos, sin)", "rotate(k, cos, sin)"),
        (">= self.head_dim // 4  # the slow", "< self.head_dim // 4  # the slow"),
        ("F.pad(k, (0, 0, 0, 0, 1, -1))", "F.pad(k, (0, 0, 0, 0, -1, 1))"),
        ("k = torch.where(self.shifted, F.pad(k, (0, 0, 0, 0, 1, -1)), k)", ""),
        ("gate = 2 * torch.sigmoid(", "gate = torch.sigmoid("),
        ("x[..., : self.GATE_CHANNELS]", "x[..., -self.GATE_CHANNELS :]"),
        ("(y * gate[:, :, :H]).reshape", "y.reshape"),
        ("v = v + gate[:, :, H:] *", "v = v +"),
        ("v = v + gate[:, :, H:] *", "v = v + gate[:, :, :H] *"),
        ("x = self.residual_lambda * x  #", "#"),
        ("x = x + self.x0_lambda * x0", "x = x + x0"),
        ("if layer.value_embed else None  # and", "if not layer.value_embed else None  # and"),
        ("window_size=(window, 0)", "window_size=(window - 1, 0)"),
        ("F.leaky_relu(x, 0.3).square()", "F.leaky_relu(x, 0.3)"),
        ("F.leaky_relu(x, 0.3)", "F.leaky_relu(x)"),
        ("F.leaky_relu(x, 0.3)", "F.relu(x)"),
        ("self.attn(norm(x), idx", "self.attn(x, idx"),
        ("h = norm(x)\n        x = x + self.mlp(h)", "h = x\n        x = x + self.mlp(h)"),
        ("return x + self.attn(", "return self.attn("),
        ("x = x + self.mlp(h)", "x = self.mlp(h)"),
        ("else x + self.experts(h)", "else self.experts(h)"),
        ("return norm(x)\n\n    def compile_trunk", "return x\n\n    def compile_trunk"),
        ("return norm(x)\n\n    def trunk", "return x\n\n    def trunk"),
        ("F.embedding(idx, embed) + sum(ngrams)", "F.embedding(idx, embed)"),
        ("return SOFTCAP * torch.tanh(logits / SOFTCAP) if SOFTCAP else logits", "return logits"),
        ("targets, softcap=SOFTCAP, reduction", "targets, reduction"),
        ("softcap=SOFTCAP, reduction=reduction)", "softcap=SOFTCAP)"),
        ("for back in range(1, n):", "for back in range(1, n - 1):"),
        ("F.pad(idx, (back, -back))", "F.pad(idx, (-back, back))"),
        ("ngram_hash(idx, self.n) >> 24", "ngram_hash(idx, self.n) >> 25"),
        ("[table(idx) for table in self.ngram_embeds]", "[table(idx) for table in self.ngram_embeds[:1]]"),
        ("induction_embed), induction_embed[-1])", "induction_embed), 0)"),
        ("idx.gather(1, before + 1)", "idx.gather(1, before.relu())"),
        ("for table in (*self.ngram_embeds, self.induction_embed):", "for table in self.ngram_embeds:"),
        ("super().__init__(rows, n_embd, dtype=dtype)", "super().__init__(rows, n_embd)"),
        ("ngram_hash(idx, 3).sort(dim=1, stable=True)", "ngram_hash(idx, 2).sort(dim=1, stable=True)"),
        ("sort(dim=1, stable=True)", "sort(dim=1, descending=True)"),
        ("order[:, :-1], -1), (1, 0), value=-1)", "order[:, :-1], -1), (0, 1), value=-1)"),
        ("order[:, :-1], -1)", "order[:, 1:], -1)"),
        ("order[:, :-1], -1)", "order[:, :-1], 0)"),
        ("before >= 0", "before > 0"),
        ("self.trunk(idx, *induction(idx), ", "self.trunk(idx, *induction(idx)[:1], torch.ones_like(idx).bool(), "),
        ("if window < T else (T, 0)", "if window <= T else (T, 0)"),
        ("(0, 0, 0, 0, S, W - S)", "(0, 0, 0, 0, W - S, S)"),
        ("y.reshape(B, -1, H, D)[:, S : S + T]", "y.reshape(B, -1, H, D)[:, :T]"),
        ("config.full_heads * (i % 4 == 0)", "config.full_heads"),
        ("shift=i % 2 * window // 2", "shift=0"),
        ("((full, T), (rest, self.layer.window))", "((full, T), (rest, T))"),
        ("value_embed=i % 2 == 0)", "value_embed=i % 2 == 1)"),
        ("in reversed(range(config.depth))", "in range(config.depth)"),
        ('1 if "embed" in name else INIT_SCALE', "1"),
        ('0 if "c_proj" in name or "attn.gate." in name', '0 if "attn.gate." in name'),
        ('0 if "c_proj" in name or "attn.gate." in name', '0 if name.endswith("c_proj.weight") or "attn.gate." in name'),
        ("std=0.001", "std=0.02"),
        ("bound = 3**0.5 *", "bound ="),
        ("nn.init.constant_(block.x0_lambda, X0_LAMBDA)", "nn.init.zeros_(block.x0_lambda)"),
    ]),
    ("Experts", "train.py", ["test_reference_model.py", "-k", "expert or initial"], [
        ("token_at = row_at // K", "token_at = row_at % N"),
        ("rank, best = score + self.bias, []", "rank, best = score, []"),
        ("rank.argmax(-1, keepdim=True)", "rank.argmin(-1, keepdim=True)"),
        ("== best[-1], -math.inf)", "!= best[-1], -math.inf)"),
        ("h.view(-1, C) * weight", "h.view(-1, C)"),
        ("self.load += tokens", "self.load += 1"),
        ("self.load += tokens", "self.load.copy_(tokens)"),
        ("2 * score.gather", "score.gather"),
        ("2 * score.gather", "2 * (score + self.bias).gather"),
        ("leaky_relu_squared(h @ c_fc) @ c_proj", "leaky_relu_squared(h @ c_proj.mT) @ c_fc.mT"),
        ("torch.sign(module.load.mean() - module.load)", "torch.sign(module.load - module.load.mean())"),
        ("torch.sign(module.load.mean() - module.load)", "(module.load.mean() - module.load)"),
        ("module.load.zero_()\n", "pass\n"),
        ("nn.init.zeros_(block.experts.bias)", ""),
        ("nn.init.zeros_(block.experts.load)", ""),
    ]),
    ("Edits that are refused", "train.py", ["test_train.py"], [
        ("assert config.n_embd % config.head_dim == 0 and layer.full_heads <= self.n_head, config", "pass"),
        ("assert flash or config.seq_len %", "assert True or config.seq_len %"),
        ("assert p.grad is None", "assert True"),
        ("assert loss_scale is not None", "assert True"),
        ("assert not forgotten", "assert True"),
        ("assert given == (0, 0)", "assert True"),
        ("assert len(storages) == 1", "assert True"),
        ("[p] * p.requires_grad", "[p]"),
        ("p.ndim > 1 and p.size(-1) > 1", "p.ndim > 1"),
        ("(\".experts.\" in name) and p.size(-1) > 1", "(\".experts.\" in name)"),
        ("math.gcd(config.device_batch_size, sequences)", "min(config.device_batch_size, sequences)"),
        ("functools.partial(compiled(GPT.trunk), self)", "compiled(self.trunk)"),
        ("functools.partial(compiled(Block.mix_tokens), block)", "compiled(block.mix_tokens)"),
        ("model.eval(), {", "model, {"),
        ('p.ndim == 2 + (".experts." in name)', "p.ndim > 1"),
        ('"attn.gate." in name else', '"attn.gate" in name else'),
        ('f".{key}." in f".{name}."', "key in name"),
        ("assert config.total_batch_size % config.seq_len == 0", "assert True"),
        ("t.unflatten(1, (-1, W)).flatten(0, 1)", "t.reshape(-1, W, H, D)"),
        ("window = min(config.window, config.seq_len)", "window = config.window"),
        ("if isinstance(m, Experts)]", "if False]"),
        ("if SOFTCAP else logits", "if True else logits"),
    ]),
    ("Grouped rows", "kernels.py", ["test_group_rows.py"], [
        ("if groups > 256", "if groups > 257"),
        ("rows // size + 1  #", "rows // size  #"),
        ("rows // size + 1  #", "rows // size + 2  #"),
        ("torch.arange(groups + 1, device=device))", "torch.arange(groups + 1, device=device), right=True)"),
        ("- bounds[:-1])[ranked]", "- bounds[1:])[ranked]"),
        ("(first * size - bounds", "((first + own_blocks) * size - bounds"),
        ("own_blocks.cumsum(0) - own_blocks", "own_blocks.cumsum(0)"),
        ("& (block < first + own_blocks)", "& (block <= first + own_blocks)"),
        ("(first <= block)", "(first < block)"),
        ("(blocks * size,), n)", "(blocks * size,), 0)"),
        ("n // (8 * groups)", "n // groups"),
        (".scatter_(0, order, place), row_at", ".scatter_(0, place % n, order), row_at"),
        ("group.to(torch.uint8).sort(stable=True)", "group.to(torch.uint8).sort(stable=True, descending=True)"),
        ("there = at < len(x)", "there = at <= len(x)"),
        ("x[torch.where(there, at, 0)], 0).sum(1)", "x[torch.where(there, at, 0)], 0)[:, 0]"),
        ("_sum_rows(grad, *ctx.saved_tensors)", "_sum_rows(grad, *ctx.saved_tensors) * 2"),
        ("torch.where(there.unsqueeze(-1), x[torch.where(there, at, 0)], 0)", "x[torch.where(there, at, 0)]"),
    ]),
    ("Muon", "train.py", OPTIMIZER, [
        ("grad = grad / loss_scale\n", "\n"),
        ("momentum_buffer.lerp(grad, 1 - momentum)", "momentum_buffer.lerp(grad, momentum)"),
        ("update = grad.lerp(buffer, momentum)", "update = buffer"),
        ("assign(momentum_buffer, buffer, skip)", ""),
        ("assign(momentum_buffer, buffer, skip)", "momentum_buffer.copy_(buffer)"),
        ("* 1.02 + 1e-7", "+ 1e-7"),
        ("update.norm(dim=(-2, -1), keepdim=True)", "update.norm(dim=-1, keepdim=True)"),
        ("for a, b, c in POLAR_EXPRESS:", "for a, b, c in POLAR_EXPRESS[:4]:"),
        ("beta=0, alpha=c", "beta=1, alpha=c"),
        (".add_(b / (2 * c))", ".add_(b / c)"),
        (".add_(a - b * b / (4 * c))", ".add_(a)"),
        ("update.square().mean(dim=-1, keepdim=True)", "update.square().mean(dim=-2, keepdim=True).mT"),
        ("second_moment.lerp(row_sq, 0.05)", "second_moment.lerp(row_sq, 0.95)"),
        ("assign(second_moment, moment, skip)", ""),
        ("assign(second_moment, moment, skip)", "second_moment.copy_(moment)"),
        ("(total / even_total.clamp_min(1e-10) / moment.clamp_min(1e-10)).sqrt()", "moment.clamp_min(1e-10).rsqrt()"),
        ("cautious = update * p >= 0", "cautious = update * p <= 0"),
        ("decay * p * cautious", "decay * p"),
        ("scale * update + decay * p", "scale * update - decay * p"),
        ("p - lr * rate * (scale * update", "p - lr * rate * (update"),
        ("p - lr * rate * (scale * update", "p - lr * (scale * update"),
        ("EXPERT_LR_SCALE if p.ndim == 3 else 1.0", "EXPERT_LR_SCALE"),
        ("t = t.view(-1, *t.shape[-2:])\n", "t = t.flatten(0, -2)[None]\n"),
        (
            "assign(p, p - lr * rate * (scale * update + decay * p * cautious), skip)",
            "p.sub_(lr * rate * (scale * update + decay * p * cautious))",
        ),
        ("t = t.mT if t.size(1) < t.size(2) else t\n", "\n"),
        ("if t.size(1) % t.size(2) == 0 else t\n", "if t.size(1) == t.size(2) else t\n"),
        ("min(1, p.size(-2) / p.size(-1)) * s.size(1) / s.size(2)", "s.size(1) / s.size(2)"),
        ("min(1, p.size(-2) / p.size(-1)) * s.size(1) / s.size(2)", "min(1, p.size(-2) / p.size(-1))"),
        ("min(1, p.size(-2) / p.size(-1))", "min(1, p.numel() / p.size(-1) ** 2)"),
        ("share**0.5", "share"),
        ("(t if shape[-2] >= shape[-1] else t.mT).view(shape)", "t.reshape(shape)"),
        ("p.data = from_stack(part, p.shape)", "from_stack(part, p.shape)"),
        ("old.copy_(torch.where(skip, old, new))", "old.copy_(new)"),
    ]),
    ("Adam, dense and sparse", "train.py", OPTIMIZER, [
        ("grad_scale=loss_scale, found_inf=found_inf,", "grad_scale=loss_scale,"),
        ("grad_scale=loss_scale, found_inf=found_inf,", "found_inf=found_inf,"),
        ("lr=h[0], beta1=beta1, beta2=beta2", "lr=h[0], beta1=beta2, beta2=beta1"),
        ('weight_decay=group["weight_decay"], eps=1e-10', "weight_decay=0.0, eps=1e-10"),
        ("eps=1e-10, amsgrad", "eps=1e-8, amsgrad"),
        ("self.steps += 1 - found_inf", "self.steps += 1"),
        ("self.num_skipped += found_inf", "self.num_skipped += 1 - found_inf"),
        ("loss_scale, found_inf = self.grad_scale,", "loss_scale, found_inf = torch.ones(()),"),
        ("torch.zeros_like(p[:, :1], dtype=torch.float32)", "torch.zeros_like(p[:, :1])"),
        ("            weight.grad = None\n", ""),
        ("            p.sparse_grads.clear()\n\n", "            pass\n\n"),
        ("                    p.sparse_grads.clear()  # of", "                    pass  # of"),
        ("zip(*p.sparse_grads)", "zip(*p.sparse_grads[:1])"),
        ("[1], loss_scale, found_inf)", "[1], loss_scale, self.steps)"),
        ("torch.zeros_like(p) if p.grad is None else p.grad for p", "torch.ones_like(p) if p.grad is None else p.grad for p"),
    ]),
    ("Adam on rows", "kernels.py", ["test_row_adam.py"], [
        ("mask=place > 0, other=-1", "mask=place > 0, other=0"),
        ("while found == 4:", "for _ in range(1):"),
        ("mask=same, other=0)[:, None] * C", "mask=same, other=0)[:, None] * BLOCK"),
        ("total /= tl.load(loss_scale)", "total = total"),
        ("tl.sum(total * total, 0) / C", "tl.sum(total * total, 0)"),
        ("(tl.load(found_inf) == 0) & (mean_sq", "(mean_sq"),
        (' & (mean_sq < float("inf"))', ""),
        ("tl.where(old == 0, mean_sq, old +", "tl.where(old < 0, mean_sq, old +"),
        ("(1 - beta2) * (mean_sq - old)", "beta2 * (mean_sq - old)"),
        ("            tl.store(exp_avg_sq + row, v)\n", ""),
        ("dtype=torch.float32).index_add_(0, inverse, grads.float())", "dtype=grads.dtype).index_add_(0, inverse, grads).float()"),
        ("    total /= loss_scale\n", ""),
        ("total.square().mean(1", "total.square().sum(1"),
        ("(found_inf > 0) | ~mean_sq.isfinite()", "~mean_sq.isfinite()"),
        ("(found_inf > 0) | ~mean_sq.isfinite()", "found_inf > 0"),
        ("torch.where(old == 0, mean_sq, old.lerp(mean_sq, 1 - beta2))", "old.lerp(mean_sq, 1 - beta2)"),
        ("exp_avg_sq[rows] = torch.where(skip, old, v)", "exp_avg_sq[rows] = v"),
        ("torch.where(skip, weight, weight -", "(weight -"),
    ]),
    ("The groups and their schedules", "train.py", OPTIMIZER, [
        ("(model.config.n_embd / 768) ** -0.5", "(model.config.n_embd / 768) ** 0.5"),
        ("weight_decay=VALUE_EMBED_DECAY", "weight_decay=0.0"),
        ("group(X0_LR, betas=(0.96, 0.95))", "group(X0_LR)"),
        ("group(RESIDUAL_LR)", "group(X0_LR)"),
        ("group(NGRAM_LR * adamw_scale, ", "group(NGRAM_LR, "),
        ('betas=(0.0, 0.8), kind="sparse"', 'kind="sparse"'),
        ('"induction_embed": group(INDUCTION_LR * adamw_scale)', '"induction_embed": group(INDUCTION_LR)'),
        ('        "induction_embed": group(INDUCTION_LR * adamw_scale),\n', ""),
        ('group(UNEMBEDDING_LR * adamw_scale)', 'group(EMBEDDING_LR * adamw_scale)'),
        ('group(GATE_LR)', 'group(MATRIX_LR)'),
        ("group(MATRIX_LR, None, MATRIX_DECAY, ", "group(MATRIX_LR, None, 0.0, "),
        ("(1 - (1 - FINAL_LR) * progress)", "(1 - progress)"),
        ("(1 - (1 - FINAL_LR) * progress)", "max(FINAL_LR, 1 - progress)"),
        ('group["lr"] = group["initial_lr"] *', 'group["lr"] = group["lr"] *'),
        ('if group["kind"] != "sparse":  # c', "if True:  # c"),
        ("min(1.0, step / MOMENTUM_WARMUP)", "step / MOMENTUM_WARMUP"),
        ("min(1.0, step / MOMENTUM_WARMUP)", "progress"),
        ('group["weight_decay"] = group["initial_weight_decay"] * (1 - progress)', 'group["weight_decay"] *= 1 - progress'),
        ('group["initial_weight_decay"] * (1 - progress)', 'group["initial_weight_decay"]'),
    ]),
    ("The wiring of a run", "train.py", WIRING, [
        ("loss = model(x, y) / grad_accum_steps", "loss = model(x, y)"),
        ("for _ in range(grad_accum_steps):", "for _ in range(1):"),
        ("    torch.manual_seed(seed)\n    model.init_weights()\n", "    torch.manual_seed(seed)\n"),
        ("    torch.manual_seed(seed)\n    model.init_weights()\n", "    model.init_weights()\n"),
        ("torch.manual_seed(seed)", "torch.manual_seed(42)"),
        ("    scaler.update()\n    optimizer.zero_grad(set_to_none=True)\n", "    scaler.update()\n"),
        ("    scaler.update()\n", ""),
        ("scaler.scale(loss).backward()", "loss.backward()"),
        ("total = total + loss.detach()", "total = loss.detach()"),
        ("set_schedules(optimizer, clock.progress(), clock.steps)", "set_schedules(optimizer, clock.progress(), 0)"),
        ("set_schedules(optimizer, clock.progress(), clock.steps)", "set_schedules(optimizer, 0.0, clock.steps)"),
        ("clock.advance(model.config.total_batch_size, loss", "clock.advance(config.device_batch_size * config.seq_len, loss"),
        ('config.seq_len, "train", device)', 'config.seq_len, "val", device)'),
        ('getattr(optimizer, "num_skipped", 0)', 'getattr(optimizer, "steps", 0)'),
        ("vocab_size=tokenizer.get_vocab_size())", "vocab_size=VOCAB_SIZE)"),
    ]),
    ("The wiring of a run", "harness.py", WIRING, [
        ("        model.config = dataclasses.replace(config, device_batch_size=smaller)\n", "        config = dataclasses.replace(config, device_batch_size=smaller)\n        return\n"),
        ("train(clock, tokenizer, device, args.seed, gpu)", "train(clock, tokenizer, device, 42, gpu)"),
        ("evaluate_bpb(model, tokenizer, config.device_batch_size, config.seq_len)", "evaluate_bpb(model, tokenizer, 4 * config.device_batch_size, config.seq_len)"),
        ("val_bpb = evaluate_bpb(", "[p.data.mul_(8).round_().div_(8) for p in model.parameters()]; val_bpb = evaluate_bpb("),
        ("(loss - self._smooth_loss) * max(0.1, 1 / (self.steps - 1))", "(loss - self._smooth_loss) * 0.1"),
    ]),
    ("The FLOPs", "train.py", ["test_train.py", "-k", "flops"], [
        ("+ (H - layer.full_heads) * layer.window", ""),
        ("layer.full_heads * T", "layer.full_heads * layer.window"),
        ("12 * self.config.head_dim * keys", "12 * self.config.n_embd * keys"),
        ("6 * matrices + 12", "2 * matrices + 12"),
        ("m.experts_per_token / len(m.bias)", "1 / len(m.bias)"),
    ]),
    ("The compiler", "train.py", ["test_train.py", "-k", "compiled_once or cudnn"], [
        ("SDPA_BACKENDS[2 * (self.dtype == torch.float16) :]", "SDPA_BACKENDS"),
        ("if self.config.depth <= 4:", "if True:"),
        ("if self.config.depth <= 4:", "if False:"),
        ("x = x0.view_as(x0)", "x = x0"),
        ("recompile_limit = 64", "recompile_limit = 8"),
        ("cache_key_tag = str(SDPA_BACKENDS)", "cache_key_tag = str(SDPA_BACKENDS[2:])"),
        ("config.full_heads * (i % 4 == 0)", "config.full_heads * (i % 5 == 0)"),
    ]),
    ("The weights", "harness.py", ["test_run.py", "-k", "saved_weights or weights_are"], [
        ("else t).contiguous() for", "else t) for"),
        ('if status == "keep" and os', 'if status != "discard" and os'),
        ('glob(f"{WEIGHTS.name}.part*")', 'glob(f"{WEIGHTS.name}.*")'),
    ]),
    ("The compiler", "harness.py", ["test_gpu.py", "-k", "inductor"], [
        ("== ReductionHint.DEFAULT", "!= ReductionHint.INNER"),
        ("features.reduction_numel, 1024)", "features.reduction_numel, 512)"),
        ("(unsure and short) or default", "unsure or default"),
        ("staticmethod(in_one_pass)", "staticmethod(default)"),
        ("force_filter_reduction_configs = True", "force_filter_reduction_configs = False"),
    ]),
    ("The warm-up", "harness.py", ["test_train.py", "-k", "warm_up"], [
        ("        model.zero_grad(set_to_none=True)\n        print(f\"Out", "        print(f\"Out"),
        ("if config.device_batch_size == 1:\n                raise", "pass"),
        ("if sequences % b == 0)", ")"),
    ]),
    ("The metric", "prepare.py", METRIC, [
        ("x[:n], y[:n] = text[:-1], text[1:]", "x[:n], y[:n] = text[:-1], text[:-1]"),
        ("n = min(EVAL_TOKENS, len(stream) - 1)", "n = min(EVAL_TOKENS, len(stream) - 1) // seq_len * seq_len"),
        ("n = min(EVAL_TOKENS, len(stream) - 1)", "n = min(EVAL_TOKENS, len(stream) - 1) // 4"),
        ("n = min(EVAL_TOKENS, len(stream) - 1)", "n = len(stream) - 1"),
        ("(math.log(2) * nbytes.sum())", "(math.log(2) * n)"),
        ("(math.log(2) * nbytes.sum())", "nbytes.sum()"),
        ("torch.where(counts.view(-1), loss, 0.0)", "loss"),
        ("y = torch.full_like(x, -1)", "y = torch.zeros_like(x)"),
        ("stream = TokenStream(tokenizer, split)\n    n = min", "stream = TokenStream(tokenizer, 'train')\n    n = min"),
        (".sum(dtype=torch.float64)", ".mean(dtype=torch.float64) * batch_size * seq_len // 1"),
    ]),
    ("The clock", "harness.py", CLOCK, [
        ("self.tokens += tokens", "self.tokens = tokens"),
        ("self.tokens / self.limit if self.limit else", "self.tokens / self.limit if self.limit is None else"),
        ("return min(1.0, self.tokens", "return (self.tokens"),
        ("(self.stopped or time.perf_counter()) - self.started", "time.perf_counter() - self.started"),
        ("if self.stopped is None:\n            synchronize()", "if True:\n            synchronize()"),
        ("if not seconds > 0 or", "if seconds <= 0 or"),
        ("if self.limit is None and self._began >= self.seconds:", "if False:"),
        ("if self.limit is None and self._began >= self.seconds:", "if self._began >= self.seconds:"),
        ("elapsed * (1 + 1 / max(1, self.steps)) < self.seconds + self.GRACE", "True"),
        ("return elapsed < self.seconds and", "return"),
        ("return self.tokens < self.limit", "return self.tokens <= self.limit"),
        ("if not loss < 100:", "if loss >= 100:"),
        ("self._checked(self._loss(), self.steps)", "self._loss()"),
        ("        self._began = self.elapsed()\n", "\n"),
    ]),
    ("The loader", "prepare.py", LOADER, [
        ("x[:], y[:] = tokens[:-1], tokens[1:]", "x[:], y[:] = tokens[:-1], tokens[:-1]"),
        ('shuffle=split == "train"', "shuffle=True"),
        ('shuffle=split == "train"', "shuffle=False"),
        ("count = (total - 1 - offset) // T", "count = (total - offset) // T"),
        ("count = (total - 1 - offset) // T", "count = min((total - 1 - offset) // T, 3)"),
        ("yield offset + int(i) * T, epoch", "yield int(i) * T, epoch"),
        ("random.permutation(count) if shuffle", "random.randint(count, size=count) if shuffle"),
        ("itertools.count(1):", "itertools.repeat(1):"),
        ('side="right"', 'side="left"'),
        ("np.random.RandomState(1)", "np.random.RandomState(2)"),
        ("return piece if len(piece) == n else", "return piece if len(piece) else"),
    ]),
    ("The metric", "prepare.py", METRIC, [
        ("        model.eval()\n", ""),
        ("module.training = True", "pass"),
        ("for module in model.modules() if module.training]", "for module in model.modules()]"),
    ]),
    ("A clone's dataset", "prepare.py", ["test_splits.py", "-k", "clone or gpu or again or torch"], [
        ("read(DATASET) or read(cache_dir()", "read(cache_dir()"),
        ('open(DATASET, "x")', 'open(DATASET, "w")'),
        ("        DATASET.write_text(", "        str("),
        ('data or own.partition("@")[0] or', "data or"),
        ("    if label in SOURCES:", "    if False:"),
        ("max(have, need)\n\n", "need\n\n"),
        ("if data not in HUB or have >= 10:", "if data not in HUB:"),
        ("if data not in HUB or have >= 10:", "if data not in HUB or have:"),
        ("return have or None", "return None"),
        ("have = int(shards) if own == name else 0", "have = int(shards or 0)"),
        ("have = int(shards) if own == name else 0", "pass"),
        ('(f"{name}x{count}" if count else name)', "name"),
        ("os.link(sibling / name, path)", "pass"),
        ("10 if capability >= (8, 0) else 2", "10 if capability > (8, 0) else 2"),
        ("else 2 if capability > (0, 0) else 1", "else 1"),
        ("if num_shards or not is_ready(current_dataset()):", "if num_shards:"),
        ("if num_shards or not is_ready(current_dataset()):", "if not is_ready(current_dataset()):"),
        ("if num_shards or not have or not is_ready(current_dataset()):", "if num_shards or not have:"),
        ("if num_shards or not have or not is_ready(current_dataset()):", "if not have or not is_ready(current_dataset()):"),
        ("if num_shards or not have or not is_ready(current_dataset()):", "if True:"),
    ]),
    ("The splits", "prepare.py", ["test_splits.py", "-k", "split or document or names or tokenizer or files or climbmix or shards or constant or downloaded"], [
        ("val, test, train = order[:twentieth], order[twentieth : 2 * twentieth]", "test, val, train = order[:twentieth], order[twentieth : 2 * twentieth]"),
        ("max(1, len(sizes) // 20)", "max(1, len(sizes) // 10)"),
        ("max(1, len(sizes) // 20)", "len(sizes) // 20"),
        ("if len(order) < 3:", "if len(order) < 2:"),
        ("if len(order) < 3:", "if len(order) < 4:"),
        ("digest not in held_out", "True"),
        ("held_out = {*val, *test}", "held_out = {*val}"),
        ("for _, text in sorted(pair for", "for _, text in list(pair for"),
        ("in_order(train[: 1 + ", "in_order(test[: 1 + "),
        ("1 + len(train) * TOKENIZER_CHARS // sum(sizes.values())", "TOKENIZER_CHARS"),
        ("1 + len(train) * TOKENIZER_CHARS // sum(sizes.values())", "1 + len(train) * TOKENIZER_CHARS // sum(sizes.values()) // 4"),
        ("paths.sort(key=hashes.get)", "pass"),
        ("folder.rglob(", "folder.glob("),
        (' if "/." not in f"/{path.relative_to(folder)}"]', "]"),
        ("label, sorted(hashes.values())", "label, [len(hashes)]"),
        ("label, sorted(hashes.values())", "label, [str(path) for path in paths]"),
        ("[(path.name, hashes[path]) for path in parquet]", "[path.name for path in parquet]"),
        ("        if size >= chars:", "        if len(batch) >= chars:"),
        ("    if batch:\n        yield batch", ""),
        ("itertools.islice(shards, num_shards)", "shards"),
        ("itertools.islice(shards, num_shards)", "itertools.islice(shards, (num_shards or 99) + 1)"),
        ("train[:num_shards]]", "train]"),
        ('["tokenizer.txt", *names], [parts[2], *parts]', '["tokenizer.txt", *names], [parts[-1], *parts]'),
        ('["tokenizer.txt", *names], [parts[2], *parts]', '["tokenizer.txt", *names], [parts[0], *parts]'),
        ("max(1, sum(counts) // 20)", "max(1, sum(counts) // 19)"),
        ("counts[-2] - max(1,", "counts[-1] - max(1,"),
        ("max(0, counts[-2]", "max(1, counts[-2]"),
        ("test, val = count - 2 * (count // 20), count - count // 20", "test, val = count - 2 * (count // 10), count - count // 20"),
        ("(stdlib, test, val), (stdlib, val, None)", "(stdlib, test, val), (stdlib, val + 1, None)"),
        ("(path.name == VAL_FILE, path.name == TEST_FILE)", "(path.name == TEST_FILE, path.name == VAL_FILE)"),
        ("{VAL_FILE} < {path.name for path in parquet} - {TEST_FILE}", "{VAL_FILE} <= {path.name for path in parquet}"),
        ("(TEST_FILE, VAL_FILE, *train)", "(VAL_FILE, TEST_FILE, *train)"),
        ("cuts = [0, 10_000,", "cuts = [0, 9_000,"),
        ("num_shards * 250_000, 250_000", "num_shards * 240_000, 240_000"),
        ("sizes = [VOCAB_SIZE, EVAL_TOKENS,", "sizes = [EVAL_TOKENS,"),
        ("TOKENIZER_CHARS, TOKENIZER_DOC_CHARS, SHARD_CHARS]", "TOKENIZER_CHARS, SHARD_CHARS]"),
        ('math.inf if name.startswith("train") else EVAL_TOKENS + 1', 'EVAL_TOKENS + 1'),
        ('math.inf if name.startswith("train") else EVAL_TOKENS + 1', 'math.inf'),
        ("else EVAL_TOKENS + 1", "else EVAL_TOKENS"),
        ("checksums + TokenStream(tokenizer, \"val\").checksums", "checksums"),
        ("if sizes[\"val\"] <= EVAL_TOKENS:", "if sizes[\"val\"] < 0:"),
        ("(errno.EMFILE, errno.ENFILE)", "(errno.ENFILE,)"),
        ("train_shards += name.startswith(\"train\")", "train_shards += 1"),
        ('np.memmap(p, mode="r") if p.stat().st_size else b""', 'np.memmap(p, mode="r")'),
        ("arriving[path].result()", "pass"),
        ("for path, *_ in parts[i:]]", "for path, *_ in parts[i : i + 1]]"),
    ]),
    ("Preparing", "prepare.py", ["test_prepare.py", "-k", "run or shard or network or vain or text or tokenizer or batches"], [
        ("(?s:.{1,8191})(?:\\n|\\Z)|(?s:.{1,8192})", "(?s:.{1,8192})"),
        ("text[:TOKENIZER_DOC_CHARS] for", "text for"),
        ("for text in texts), TOKENIZER_CHARS), [])", "for text in texts), 10**9), [])"),
        ("VOCAB_SIZE - len(SPECIAL_TOKENS)", "VOCAB_SIZE"),
        ("timeout=6", "timeout=60"),
        ("daemon=True).start()", "daemon=False).start()"),
        ("ids += [bos, *(", "ids += [*("),
        ("and read(current) == directory.name:", "and False:"),
        ("        if data or own:\n            raise", "        if data:\n            raise"),
        ("return make(\"embedded\", None)", "return prepare(\"embedded\", None)"),
        ("                open_shard(path, tokenizer.fingerprint, verify=True)\n            continue", "                raise PrepareError\n            continue"),
        ("disallowed_special=()", "allowed_special='all'"),
        ("                open_shard(path, tokenizer.fingerprint, verify=True)\n            continue", "                open_shard(path, tokenizer.fingerprint)\n            continue"),
    ]),
    ("Preparing", "prepare.py", ["test_prepare_faults.py", "-k", "shard or damaged or two_at or climbmix or stays or passes or nobody"], [
        ("            lock(file, math.inf)\n", ""),
        ("return reached.set_exception(error)", "reached.set_exception(error)"),
        ("verify and hashlib.sha256(tokens)", "False and hashlib.sha256(tokens)"),
        ("(MAGIC, fingerprint, len(tokens)) and n > 0", "(MAGIC, fingerprint, len(tokens))"),
        ("    if data in HUB:  # hugg", "    if False:  # hugg"),
        ("status not in (408, 416, 429)", "status not in (408, 416)"),
        ("time.sleep(2**attempt)", "pass"),
        ("if type(error) in (OSError, PrepareError) or status == 416:", "if False:"),
    ]),
    ("The log", "harness.py", LOG, [
        ('round(val_bpb, 6) >= best["val_bpb"]', 'round(val_bpb, 6) > best["val_bpb"]'),
        ('round(val_bpb, 6) >= best["val_bpb"]', 'val_bpb >= best["val_bpb"]'),
        ('(row["gpu"], row["dataset"]) == (gpu, dataset)', 'row["gpu"] == gpu'),
        ('(row["gpu"], row["dataset"]) == (gpu, dataset)', 'row["dataset"] == dataset'),
        ('for row in rows if row["status"] != "crash")', "for row in rows)"),
        ('for row in rows if row["status"] != "crash")', 'for row in rows if row["status"] == "keep")'),
        ('"" if math.isfinite(val_bpb) else f"val_bpb {val_bpb}"', '""'),
        ("clean, (head[0][:7], description", "clean, (head[0], description"),
        ("map(clean, (head", "map(str, (head"),
        ("if not lock(file, patience=60):", "if False:"),
        ('f"{val_bpb:.6f}", f"{memory_gb:.1f}"', 'f"{val_bpb:.4f}", f"{memory_gb:.1f}"'),
        ('f"{description} [{reason}]" if reason', "description if reason"),
    ]),
    ("The log", "harness.py", ["test_harness.py", "-k", "row"], [
        ('before = b"" if text.endswith(b"\\n") else b"\\n" if text', 'before = b"" if text'),
        ('text.split(b"\\n")[0].rstrip() != header', 'text.split(b"\\n")[0] != header'),
    ]),
    ("The report", "night/wave.py", ["test_report.py", "-k", "test_score"], [
        ("not args.score or TEST in", "True or TEST in"),
        ('key=lambda row: row["status"] != "crash")', "key=lambda row: 0)"),
        ('if "AUTORESEARCH_CACHE" in os.environ:', "if False:"),
    ]),
    ("A run in a night", "harness.py", ["test_night.py", "-k", "says_if or brackets"], [
        ('" (train.py differs)" * dirty', '""'),
        ('reason.translate(str.maketrans("[]", "()"))', "reason"),
    ]),
    ("A run in a night", "night/run.py", ["test_night.py", "-k", "put_aside"], [
        ("logged and len(rows_of(head[0])) <= before", "logged and len(rows_of(head[0])) < 2"),
    ]),
    ("A run in a night", "night/run.py", ["test_night.py", "-k", "dataset_that"], [
        ("dataset=dataset, reason=reason)", "dataset=prepare.dataset_id(), reason=reason)"),
    ]),
]  # fmt: skip


class Bug:
    def __init__(self, part: str, file: str, tests: list[str], old: str, new: str):
        self.part, self.file, self.tests, self.old, self.new = part, file, tests, old, new

    def __str__(self) -> str:
        return f"{self.part}: {self.old!r} -> {self.new!r}"

    @property
    def count(self) -> int:
        return (ROOT / self.file).read_text().count(self.old)

    def outcome(self) -> tuple[bool, str]:
        """Whether the tests noticed it, and which one did."""
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copytree(ROOT / "night", folder / "night", ignore=shutil.ignore_patterns("__pycache__"))
            for path in ROOT.iterdir():
                if path.suffix in (".py", ".toml", ".tsv", ".md", ".ipynb") or path.name == ".gitignore":
                    shutil.copy(path, folder)
            (folder / self.file).write_text((folder / self.file).read_text().replace(self.old, self.new))
            process = multiprocessing.get_context("fork").Process(target=run_pytest, args=(folder, self.tests))
            process.start()
            process.join(TIMEOUT)
            if process.is_alive():
                process.kill()
                process.join()
                return True, "timeout"
            output = (folder / "output").read_text()
            failed = re.search(r"^FAILED tests/(.*)$", output, re.MULTILINE)
            if process.exitcode == 1 and failed:
                return True, failed[1]
            return False, f"pytest ended with {process.exitcode}: " + output.strip().rpartition("\n")[2]


def run_pytest(folder: Path, tests: list[str]) -> None:
    """In a process of its own, which it ends with pytest's exit status."""
    import pytest

    os.chdir(folder)
    output = os.open("output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1), os.dup2(output, 2)
    sys.path[0] = str(folder / "tests")
    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", f"tests/{tests[0]}", *tests[1:]])
    sys.stdout.flush()
    os._exit(status)


def import_what_takes_long() -> None:
    """Once, for the processes that are forked from here: nothing of ours, and nothing that starts threads."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import hypothesis  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import pytest  # noqa: F401
    import requests  # noqa: F401
    import safetensors.torch  # noqa: F401
    import tiktoken  # noqa: F401
    import torch._dynamo  # noqa: F401
    import tqdm  # noqa: F401


def main() -> None:
    bugs = [Bug(part, file, tests, old, new) for part, file, tests, pairs in SECTIONS for old, new in pairs]
    words = [word for word in sys.argv[1:] if word != "--check"]
    bugs = [bug for bug in bugs if not words or any(word in str(bug) for word in words)]
    stale = [bug for bug in bugs if bug.count != 1]
    for bug in stale:
        print(f"STALE, occurs {bug.count} times in {bug.file}: {bug}")
    survivors = []
    if "--check" not in sys.argv:
        import_what_takes_long()
        with ProcessPoolExecutor(int(os.environ.get("JOBS", 1)), multiprocessing.get_context("fork")) as pool:
            tried = [bug for bug in bugs if bug not in stale]
            for bug, (noticed, reason) in zip(tried, pool.map(Bug.outcome, tried), strict=True):
                survivors += [] if noticed else [bug]
                print(f"{'killed' if noticed else 'SURVIVED'} {bug}\n    {reason}", flush=True)
    print(f"{len(bugs)} bugs, {len(stale)} stale, {len(survivors)} survived")
    sys.exit(bool(stale or survivors))


if __name__ == "__main__":
    main()
