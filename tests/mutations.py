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
ROWS = ["test_cross_entropy.py", "-k", "rows_match and not 32000 and not 50257 or 50257-15 or huge or infin or silent"]
FUSED = ["test_cross_entropy.py", "-k", "not rows_match and not huge and not infinite"]
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
        ("window_size_left=window,", "window_size_left=window - 1,"),
        ("window_size_left=window,", "window_size_left=T,"),
        ("return sdpa(q, k, v, T, 0)", "return sdpa(q, k, v, T // 2, 0)"),
        ("window_size_right=0)[0]", "window_size_right=0)[0] * 2"),
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
    ]),
    ("Edits that are refused", "train.py", ["test_train.py"], [
        ("assert config.n_embd % config.head_dim == 0 and layer.full_heads <= self.n_head, config", "pass"),
        ('assert kind != "sdpa" or config.seq_len %', "assert True or config.seq_len %"),
        ("assert p.grad.is_sparse", "assert True"),
        ('assert not matrices or "c_proj" in str(matrices)', "assert True"),
        ('assert not matrices or "c_proj" in', 'assert "c_proj" in'),
        ("if p.ndim > 1]\n                assert", "]\n                assert"),
        ("assert loss_scale is not None", "assert True"),
        ("assert not forgotten", "assert True"),
        ("assert given == (0, 0)", "assert True"),
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
        ("rows // block_size + 1\n", "rows // block_size\n"),
        ("rows // block_size + 1\n", "rows // block_size + 2\n"),
        ("torch.arange(groups + 1, device=device))", "torch.arange(groups + 1, device=device), right=True)"),
        ("- bounds[:-1])[ranked]", "- bounds[1:])[ranked]"),
        ("(first * block_size - bounds", "((first + own_blocks) * block_size - bounds"),
        ("own_blocks.cumsum(0) - own_blocks", "own_blocks.cumsum(0)"),
        ("& (block < first + own_blocks)", "& (block <= first + own_blocks)"),
        ("(first <= block)", "(first < block)"),
        ("(blocks * block_size,), n)", "(blocks * block_size,), 0)"),
        ("n // (8 * groups)", "n // groups"),
        (".scatter_(0, order, place), row_at", ".scatter_(0, place % n, order), row_at"),
        ("group.to(torch.uint8).sort(stable=True)", "group.to(torch.uint8).sort(stable=True, descending=True)"),
        ("valid = at < len(x)", "valid = at <= len(x)"),
        ("x[torch.where(valid, at, 0)], 0).sum(1)", "x[torch.where(valid, at, 0)], 0)[:, 0]"),
        ("_sum_rows(grad, *ctx.saved_tensors)", "_sum_rows(grad, *ctx.saved_tensors) * 2"),
        ("torch.where(valid.unsqueeze(-1), x[torch.where(valid, at, 0)], 0)", "x[torch.where(valid, at, 0)]"),
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
        ("p - lr * (scale * update", "p - lr * (update"),
        ("t = t.view(-1, *t.shape[-2:])\n", "t = t.flatten(0, -2)[None]\n"),
        (
            "assign(p, p - lr * (scale * update + decay * p * cautious), skip)",
            "p.sub_(lr * (scale * update + decay * p * cautious))",
        ),
        ("t = t.mT if wide else t\n", "\n"),
        ("max(t.shape[-2:]) % min(t.shape[-2:]) == 0", "t.size(-2) == t.size(-1)"),
        ("max(t.shape[-2:]) % min(t.shape[-2:]) == 0", "True"),
        ("squares and not (wide and t.ndim == 3)", "squares"),
        ("(s.size(1) / p.size(-1)) ** 0.5", "(s.size(1) / s.size(2)) ** 0.5"),
        ("(s.size(1) / p.size(-1)) ** 0.5", "(s.size(1) / p.size(-1))"),
        ("(s.size(1) / p.size(-1)) ** 0.5", "(p.size(-2) / p.size(-1)) ** 0.5"),
        ("join([torch.full_like(s[:, :1, :1], scale)", "join([torch.full_like(s[:, :1, :1], scales[0])"),
        ("torch._foreach_copy_(stacks, stack", "torch._foreach_copy_(list(stack.split([len(s) for s in stacks])), stack"),
        ("if len(stacks) > 1:  #", "if len(stacks) > 2:  #"),
        ("torch.cat(parts) if len(parts) > 1 else parts[0]", "parts[0]"),
        ("old.copy_(torch.where(skip, old, new))", "old.copy_(new)"),
    ]),
    ("Adam, dense and sparse", "train.py", OPTIMIZER, [
        ("grad_scale=loss_scale, found_inf=found_inf,", "grad_scale=loss_scale,"),
        ("grad_scale=loss_scale, found_inf=found_inf,", "found_inf=found_inf,"),
        ("lr=h[0], beta1=beta1, beta2=beta2", "lr=h[0], beta1=beta2, beta2=beta1"),
        ('weight_decay=group["weight_decay"], eps=1e-10', "weight_decay=0.0, eps=1e-10"),
        ("eps=1e-10, amsgrad", "eps=1e-8, amsgrad"),
        ("steps[0] += 1 - found_inf", "steps[0] += 1"),
        ("[torch.zeros((), device=self.device)] * len(params)", "[torch.zeros((), device=self.device) for _ in params]"),
        ("self.num_skipped += found_inf", "self.num_skipped += 1 - found_inf"),
        ("loss_scale, found_inf = self.grad_scale,", "loss_scale, found_inf = torch.ones(()),"),
        ("torch.zeros_like(p[:, :1], dtype=torch.float32)", "torch.zeros_like(p[:, :1])"),
        ('self.tables[i], group["params"] = params, []', "self.tables[i] = params"),
        ("            p.grad = None\n", "            pass\n"),
        ("p.grad._indices()[0], p.grad._values()\n", "p.grad._indices()[0][:24], p.grad._values()[:24]\n"),
        ("[1], loss_scale, found_inf)", "[1], loss_scale, skip * 0.0)"),
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
        ("ids, order = ids.sort(stable=True)", "order = ids.argsort(stable=True)"),
        ("mean_sq, old.lerp(mean_sq, 1 - beta2))", "mean_sq, old.lerp(mean_sq, beta2))"),
    ]),
    ("The cross-entropy of rows", "kernels.py", ROWS, [
        ("            total *= tl.exp(old_shift - shift)\n", ""),
        ("tl.maximum(tl.max(z, 0), -1e38) if", "tl.max(z, 0) if"),
        ("tl.where(ignored, 0.0, loss)", "loss"),
        ('tl.log(total) - s_y, float("nan"))', "tl.log(total) - s_y, 0.0)"),
        ("valid = (target >= 0) & (target < V)", "valid = target < V"),
        ("valid = (target >= 0) & (target < V)", "valid = (target >= 0) & (target <= V)"),
        ("tl.log(total) + shift)", "tl.log(total))"),
        ("a + tl.load(lse_scale + row)", "tl.load(lse_scale + row)"),
        ("a = tl.where(ignored, 0.0, tl.load(row_scale", "a = tl.where(False, 0.0, tl.load(row_scale"),
        ("tl.load(row_scale + row * scale_stride)", "tl.load(row_scale)"),
        ("grads += row * grads_stride", "grads += row * logits_stride"),
        ("first_scale = scale * tl.exp(first_shift - shift) if cap is None else scale", "first_scale = scale"),
        ("tl.store(grads + start + cols, e * slope * scale", "tl.store(grads + start + cols, e * scale"),
        ("(e_y * scale - a) * slope_y", "e_y * scale - a"),
        ("(e_y * scale - a) * slope_y", "(e_y * scale - 1) * slope_y"),
        (".squeeze(1).masked_fill(ignored, 0))", ".squeeze(1))"),
        ("row_scale.masked_fill(ignored, 0)[:, None]", "row_scale[:, None]"),
        ("lse.copy_(s.logsumexp(1))", "lse.copy_(logits.float().logsumexp(1))"),
        ("a if lse_scale is None else a + lse_scale[:, None]", "a"),
        ("scatter_add_(1, target, -a)", "scatter_add_(1, target, -torch.ones_like(a))"),
        ("g * (1 - (s / softcap) ** 2) if softcap else g", "g"),
        ("(targets >= 0) & (targets < v)", "(targets < v)"),
        ("(targets >= 0) & (targets < v)", "(targets >= 0)"),
    ]),
    ("The fused cross-entropy", "kernels.py", FUSED, [
        ("type(x) is not Tensor", "False"),
        ("if torch.is_grad_enabled():\n        raise RuntimeError", "if False:\n        raise RuntimeError"),
        (" or torch._C._autograd._get_current_graph_task_keep_graph()", ""),
        ("return torch.ones_like(scale), scale.nan_to_num(posinf=1.0)", "return scale, torch.ones_like(scale)"),
        ("scale.nan_to_num(posinf=1.0)", "scale"),
        ("boost = 2.0**15 if", "boost = 2.0**17 if"),
        ("boost = 2.0**15 if x.dtype == torch.float16 else 1.0", "boost = 1.0"),
        ("beta=float(i > 0)", "beta=1.0"),
        ("beta=float(i > 0)", "beta=0.0"),
        ("lse_scale[part] * boost", "lse_scale[part]"),
        ("lse_scale[part] * boost", "lse_scale[:rows] * boost"),
        ("row_scale[part], softcap", "row_scale[:rows], softcap"),
        ("few = len(x) <= 2 *", "few = len(x) <= 8 *"),
        ("dw if n else dw.zero_()", "dw"),
        ("[reduce and need for need", "[need for need"),
        ("late = row_scale * late", "late = row_scale"),
        ("and len(x):  # the row kernel", "and False:  # the row kernel"),
        ("and len(x):  # the row kernel", ":  # the row kernel"),
        ("(row_scale.abs() + lse_scale.abs())", "row_scale.abs()"),
        ("(row_scale.abs() + lse_scale.abs())", "lse_scale.abs()"),
        (".amax().nan_to_num(1.0, 1.0)", ".amin().nan_to_num(1.0, 1.0)"),
        ("largest.clamp(torch.finfo(torch.float32).tiny)", "largest"),
        ("row_scale / late, lse_scale / late", "row_scale / late, lse_scale"),
        ("grads = logits if inplace else logits.new_empty(logits.shape)", "grads = logits"),
        ("grads = logits if inplace else logits.new_empty(logits.shape)", "grads = logits.new_empty(logits.shape)"),
        ("_scaled(grads, grad_loss * late)", "_scaled(grads, grad_loss)"),
        ("if not 0 <= (softcap or 0) <= 50", "if not 0 <= (softcap or 0) <= 5000"),
        ("if reduce and not return_lse and", "if reduce and"),
        ("(targets != ignore_index).sum()", "(targets >= 0).sum()"),
        ("loss = losses.sum() * row_scale if reduce else losses\n    return (loss", "loss = losses.mean() if reduce else losses\n    return (loss"),
        ("torch.is_grad_enabled() and logits.requires_grad:", "logits.requires_grad:"),
        ("logits if logits.stride(-1) == 1 else logits.contiguous()", "logits"),
        ("        x = x.to(torch.get_autocast_dtype(x.device.type))\n    x, targets", "        pass\n    x, targets"),
    ]),
    ("The 4-bit linear", "kernels.py", ["test_linear4bit.py"], [
        ("if check_finite and not absmax", "if not absmax"),
        ("absmax_ptr + word // GROUP", "absmax_ptr + word // BLOCK"),
        ("(4 * (i ^ 1))", "(4 * i)"),
        ("if stored != (torch.uint8, n, torch.float32, n)", "if stored[0] != torch.uint8"),
        ("if shape[-1] % block_size", "if math.prod(shape) % block_size"),
        ("x if ctx.needs_input_grad[3] else None", "x"),
        ("dy.sum(0, dtype=torch.float32)", "dy.sum(0)"),
        ("nn.init.kaiming_uniform_(self.weight, a=5**0.5)", "self.weight.data.zero_()"),
        ("layer.packed, layer.absmax, layer.bias = packed, absmax, linear.bias", "layer.packed, layer.absmax = packed, absmax"),
        ("        self.absmax.copy_(absmax)\n", ""),
        ("self.packed.copy_(packed)", "self.packed = packed"),
        (" or x.shape[-1] != k:", ":"),
        ("if x.dtype not in FLOATS or x.device", "if x.device"),
        ("            x = x.to(torch.get_autocast_dtype(x.device.type))\n        if", "            pass\n        if"),
        ('assert not torch.is_grad_enabled(), "the 4', 'assert True, "the 4'),
        ("return torch.ops.autoresearch.matmul_4bit.default if _tracing(x) else _matmul_4bit", "return _matmul_4bit"),
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
        ("group(MATRIX_LR * scale, None, MATRIX_DECAY, ", "group(MATRIX_LR * scale, None, 0.0, "),
        ("group(MATRIX_LR * scale, None,", "group(MATRIX_LR, None,"),
        ("(name, EXPERT_LR_SCALE) if p.ndim == 3", "(name, EXPERT_LR_SCALE) if p.ndim == 2"),
        ("(1 - (1 - FINAL_LR) * progress)", "(1 - progress)"),
        ("(1 - (1 - FINAL_LR) * progress)", "max(FINAL_LR, 1 - progress)"),
        ('group["lr"] = group.setdefault("initial_lr", group["lr"]) *', 'group["lr"] = group["lr"] *'),
        ('if kind != "sparse":  # c', "if True:  # c"),
        ("min(1.0, step / MOMENTUM_WARMUP)", "step / MOMENTUM_WARMUP"),
        ("min(1.0, step / MOMENTUM_WARMUP)", "progress"),
        ('group["weight_decay"] = group.setdefault("initial_weight_decay", group["weight_decay"]) * (1 - progress)', 'group["weight_decay"] *= 1 - progress'),
        ('group.setdefault("initial_weight_decay", group["weight_decay"]) * (1', 'group.setdefault("initial_weight_decay", group["weight_decay"]) * (1 - 0 *'),
        ('group.setdefault("initial_weight_decay", group["weight_decay"]) * (1', 'group.setdefault("initial_lr", group["weight_decay"]) * (1'),
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
        ("evaluate_bpb(model, tokenizer, model.config.device_batch_size", "evaluate_bpb(model, tokenizer, 4 * model.config.device_batch_size"),
        ("bpb = evaluate_bpb(", "[p.data.mul_(8).round_().div_(8) for p in model.parameters()]; bpb = evaluate_bpb("),
        ("(loss - self.mean) * max(0.1, 1 / self.count)", "(loss - self.mean) * 0.1"),
        ("(loss - self.mean) * max(0.1, 1 / self.count)", "(loss - self.mean) / self.count"),
    ]),
    ("The FLOPs", "train.py", ["test_train.py", "-k", "flops"], [
        ("+ (H - layer.full_heads) * layer.window", ""),
        ("layer.full_heads * T", "layer.full_heads * layer.window"),
        ("12 * self.config.head_dim * keys", "12 * self.config.n_embd * keys"),
        ("6 * matrices + 12", "2 * matrices + 12"),
        ("m.experts_per_token / len(m.bias)", "1 / len(m.bias)"),
    ]),
    ("The compiler", "train.py", ["test_train.py", "-k", "compiled_once or cudnn"], [
        ("BACKENDS[2 * (self.dtype == torch.float16) :]", "BACKENDS"),
        ("if self.config.depth <= 4:", "if True:"),
        ("if self.config.depth <= 4:", "if False:"),
        ("x = x0.view_as(x0)", "x = x0"),
        ("recompile_limit = 64", "recompile_limit = 8"),
        ("cache_key_tag = str(BACKENDS)", "cache_key_tag = str(BACKENDS[2:])"),
        ("config.full_heads * (i % 4 == 0)", "config.full_heads * (i % 5 == 0)"),
    ]),
    ("Weights and text", "harness.py", ["test_run.py", "-k", "saved or a_kill or sample or writ or wrote"], [
        ("else t).contiguous() for", "else t) for"),
        ('glob(f"{WEIGHTS.name}.part*")', 'glob(f"{WEIGHTS.name}.*")'),
        ('if not Path("/proc", left.suffix[5:]).exists():', "if False:"),
        ("if args.save:", "if True:"),
        ("model.eval().load_state_dict", "model.load_state_dict"),
        ('torch.compiler.set_stance("force_eager")', "torch.no_grad()"),
        ("time.perf_counter() + seconds\n", "time.perf_counter() + 2 * seconds\n"),
        ("len(ids) + tokens, time", "tokens, time"),
        ("context = ids[-seq_len:]", "context = ids[:seq_len]"),
        ("device=device))[0, len(context) - 1]", "device=device))[0, -1]"),
        ("if token == tokenizer.get_bos_token_id():", "if False:"),
        ("torch.softmax(logits / 0.8, -1)", "torch.softmax(logits * 0, -1)"),
        (", prepend=tokenizer.get_bos_token_id()), model.config.seq_len", "), model.config.seq_len"),
        ('(f"    {line}" for line in textwrap', '(f"{line}" for line in textwrap'),
        ('f"train.py: no sample: {crash_reason(error)}", file=sys.stderr', 'f"train.py: no sample: {crash_reason(error)}"'),
    ]),
    ("The summary", "harness.py", ["test_run.py", "-k", "zero or before_the_first or begins_with or far_fewer or split or not_logged or screening or never"], [
        ("TIME_BUDGET if args.seconds is None else args.seconds", "TIME_BUDGET"),
        ("None if clock.limit else clock.seconds, clock.limit, args.gpu", "clock.seconds, None, args.gpu"),
        ('score(model, tokenizer, "val")', 'score(model, tokenizer, "test")'),
        ('result["test_bpb"] = score(model, tokenizer, "test")', 'result["test_bpb"] = score(model, tokenizer, "val")'),
        ('if night_record().get("score_test"):', "if night_record():"),
        ('not by_hand or night_record().get("log")', 'not by_hand or "log" in night_record()'),
        ('result["tokens_M"] < 0.9 * best["tokens_M"]', 'result["tokens_M"] < best["tokens_M"]'),
        ('result["tokens_M"] < 0.9 * best["tokens_M"]', "False"),
        ('("seconds", "tokens", "gpu") if getattr', '("seconds", "tokens") if getattr'),
        ("assert clock.stopped is not None", "assert True"),
        ('{dtype}, {model.config}"', '{dtype}"'),
    ]),
    ("The summary's times", "harness.py", ["test_run.py", "-k", "same_seed"], [
        ('"first_step_sec": f"{total - (', '"first_step_sec": f"{total + ('),
        ('f"{clock.tokens / seconds:.0f}"', 'f"{clock.tokens / total:.0f}"'),
        ("eval_seconds = time.perf_counter() - start", "eval_seconds = time.perf_counter()"),
        ("ticks = int(", "ticks = 0 * int("),
        ("return sum(p.numel() for p in model.parameters())", "return sum(p.numel() for p in model.parameters() if p.ndim < 2)"),
    ]),
    ("The end of a run", "harness.py", ["test_run.py", "-k", "lost_run or crash_row"], [
        ("if not math.isfinite(bpb):", "if False:"),
        ("for line in lines[:-3:-1]", "for line in lines[-2:]"),
        ("for line in lines[:-3:-1]", "for line in lines[:-2:-1]"),
        ('Path(frame.filename).name == "train.py"', "True"),
        ('or re.search("out of memory|can\'t allocate memory", str(error))', ""),
    ]),
    ("The end of a run", "harness.py", ["test_harness.py", "-k", "wrong_shape"], [
        ("lines += re.findall(", "re.findall("),
    ]),
    ("Signals", "harness.py", ["test_run.py", "-k", "signal or an_interrupt"], [
        ("handle_signals(signal.SIG_IGN)  # a second", "# a second"),
        ("handle_signals(signal.SIG_DFL)", "pass"),
        ("handle_signals(on_signal)", "pass"),
        ("    handle_signals(signal.SIG_IGN)\n    sys.exit(128", "    sys.exit(128"),
        ('{130: "interrupted", 143: "killed"}', '{143: "interrupted", 130: "killed"}'),
    ]),
    ("The progress line", "harness.py", ["test_run.py", "-k", "terminal or go_lines or hangs"], [
        ("        clock.release()\n        entry.log", "        entry.log"),
        ("        self._line.end()\n", ""),
        ("live = sys.stdout.isatty()", "live = False"),
        ("live = sys.stdout.isatty()", "live = True"),
        ("self._shown = now\n", "pass\n"),
        ("(0.2 if live else 5)", "(0.2 if live else 50)"),
        ("HANG = 120", "HANG = 12"),
        ("faulthandler.cancel_dump_traceback_later()", "pass"),
    ]),
    ("A whole run", "train.py", ["test_run.py", "-k", "status_zero"], [
        ("scaler.get_scale() < 1:", "scaler.get_scale() <= 1:"),
    ]),
    ("The compiler", "harness.py", ["test_gpu.py", "-k", "inductor"], [
        ("== ReductionHint.DEFAULT", "!= ReductionHint.INNER"),
        ("features.reduction_numel, 1024)", "features.reduction_numel, 512)"),
        ("(unsure and short) or default", "unsure or default"),
        ("staticmethod(in_one_pass)", "staticmethod(default)"),
        ("force_filter_reduction_configs = True", "force_filter_reduction_configs = False"),
    ]),
    ("The warm-up", "harness.py", ["test_train.py", "-k", "warm_up"], [
        ("            model.zero_grad(set_to_none=True)\n            print(f\"Out", "            print(f\"Out"),
        ("if config.device_batch_size == 1:\n                    raise", "pass"),
        ("if sequences % b == 0)", ")"),
        ("    for name, buffer in buffers.items():\n        model.get_buffer(name).copy_(buffer)\n", ""),
        ("{name: buffer.clone() for", "{name: buffer for"),
        ("for name, buffer in model.named_buffers()}", 'for name, buffer in model.named_buffers() if name in model.state_dict()}'),
        ('[device] if device.type == "cuda" else []):', "[], enabled=False):"),
    ]),
    ("The GPU", "train.py", ["test_train.py", "-k", "numerics or memory or too_old or grows"], [
        ('torch.bfloat16, "fa3" if gpu.has_fa3 else "fa2"', 'torch.bfloat16, "fa2"'),
        ("gpu.capability < (8, 0)", "gpu.capability <= (8, 0)"),
        ("gpu.capability < (8, 0)", "gpu.capability < (7, 5)"),
        ("gpu.capability < (7, 0)", "gpu.capability < (6, 0)"),
        ("0 < gpu.memory < 2 * rows * row_bytes", "0 < gpu.memory < rows * row_bytes"),
        ("0 < gpu.memory < 2 * rows * row_bytes", "gpu.memory < 2 * rows * row_bytes and rows > 1000"),
        ("while 0 < gpu.memory", "if 0 < gpu.memory"),
        ("2 * config.n_embd * len(NGRAMS)", "2 * config.n_embd"),
        ("if gpu.peak_flops >= least", "if gpu.peak_flops > 2 * least"),
    ]),
    ("The GPU", "harness.py", ["test_gpu.py"], [
        ("capability == (9, 0) and fa3_installed())", "fa3_installed())"),
        ("has_fa3=here.has_fa3 and capability == (9, 0))", "has_fa3=here.has_fa3)"),
        ("has_fa3=here.has_fa3 and capability == (9, 0))", "has_fa3=gpu.has_fa3)"),
        ("min(here.capability, gpu.capability)", "gpu.capability"),
        ("torch.cuda.get_device_capability() == (9, 0) and not fa3", "not fa3"),
        ("== (9, 0) and not fa3_installed()", "== (9, 0) and fa3_installed()"),
        ("if capability == (9, 0) and not here.has_fa3:", "if not here.has_fa3:"),
        ("if capability == (9, 0) and not here.has_fa3:", "if False:"),
        ("    except Exception as error:\n        fix", "    except ImportError as error:\n        fix"),
        ("gigabytes * 10**9", "gigabytes * 2**20"),
        ("peak, p.total_memory,", "peak, 0,"),
        ('(named or named_gpu("cpu"))._replace(capability=None)', 'named_gpu("cpu")'),
        ("clock_rate(p) / 1000", "clock_rate(p)"),
        ("/ (1 + geforce)", ""),
    ]),
    ("The reset of the tables", "train.py", ["test_train.py", "-k", "start_over"], [
        ("0.98 * epoch_tokens", "epoch_tokens"),
        ("(clock.tokens + left) // self", "left // self"),
        ("return self.epochs_left < before", "return self.epochs_left <= before"),
        ("min(before, left // self.epoch_tokens)", "left // self.epoch_tokens - 1"),
        ("if resets.due(clock):", "if resets.due(clock) and clock.steps > 3:"),
    ]),
    ("Edits of the optimizer", "train.py", ["test_train.py", "-k", "edit or tables or adamw"], [
        ("            table.sparse = False  # g", "            pass  # g"),
        ('table.sparse = groups["ngram_embeds"]["kind"] == "sparse"', "table.sparse = False"),
        ('kind = group.get("kind")', 'kind = group["kind"]'),
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
        ("if self.limit is None and self._step_began >= self.seconds:", "if False:"),
        ("if self.limit is None and self._step_began >= self.seconds:", "if self._step_began >= self.seconds:"),
        ("expected_end < self.seconds + self.OVERRUN", "True"),
        ("expected_end < self.seconds + self.OVERRUN", "expected_end < self.seconds"),
        ("OVERRUN = 3 ", "OVERRUN = 5 "),
        ("if progress > 0.05 else math.inf", "if progress > 0 else math.inf"),
        ("self.tokens * (1 / progress - 1)", "self.tokens / progress"),
        ("return elapsed < self.seconds and", "return"),
        ("return self.tokens < self.limit", "return self.tokens <= self.limit"),
        ("if not loss < 100:", "if loss >= 100:"),
        ("            self._losses.read()\n", ""),
        ("now = self._step_began = self.elapsed()", "now = self.elapsed()"),
        ("loss, self._pending = self._pending(), None", "loss = self._pending()"),
        ("gc.enable()", "pass"),
        ("        gc.disable()  # a collection", "        # a collection"),
        ("            self.count += 1\n", ""),
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
    ("A clone's dataset", "prepare.py", ["test_splits.py", "-k", "clone or gpu or again"], [
        ("name = own or read(cache_dir()", "name = read(cache_dir()"),
        ('open(DATASET, "x")', 'open(DATASET, "w")'),
        ("    if own:\n        raise PrepareError(f\"{DATASET}", "    if False:\n        raise PrepareError(f\"{DATASET}"),
        ("        DATASET.write_text(", "        str("),
        ("wanted = data or source or", "wanted = data or"),
        ("max(num_shards or 0, default_shards())", "num_shards or default_shards()"),
        ("max(num_shards or 0, default_shards())", "default_shards()"),
        ("num_shards = int(shards) if same else None", "pass"),
        ('(f"{name}x{num_shards}" if num_shards else name)', "name"),
        ("os.link(path, directory / path.name)", "pass"),
        ("for name in done - set(made):", "for name in ():"),
        ("10 if capability >= (8, 0) else 2", "10 if capability > (8, 0) else 2"),
        ("else 2 if capability > (0, 0) else 1", "else 1"),
        ("if num_shards or not is_ready(current_dataset()):", "if num_shards:"),
        ("if num_shards or not is_ready(current_dataset()):", "if not is_ready(current_dataset()):"),
    ]),
    ("The splits", "prepare.py", ["test_splits.py", "-k", "split or document or names or tokenizer or files or climbmix or shards or constant"], [
        ('{0: "val", 1: "test"}', '{0: "test", 1: "val"}'),
        ("number % 20", "number % 10"),
        ("b\"%d\" % salt + text", "b\"\" + text"),
        ("files.sort(key=hashes.get)", "pass"),
        ("folder.rglob(", "folder.glob("),
        (' if "/." not in f"/{file.relative_to(folder)}"]', "]"),
        ("sorted(hashes.values())", "[len(hashes)]"),
        ("sorted(hashes.values())", "[str(file) for file in files]"),
        ("[(file.name, hashes[file]) for file in files]", "[file.name for file in files]"),
        ("for number, text in sorted(found", "for number, text in list(found"),
        ("TOKENIZER_CHARS // chars[split]", "TOKENIZER_CHARS"),
        ("TOKENIZER_CHARS // chars[split]", "TOKENIZER_CHARS // chars[split] // 4"),
        ('("tokenizer.txt", "train"), (', '("tokenizer.txt", "test"), ('),
        ('chars["train"] -= len(found[2])', 'chars["train"] -= 1'),
        ("itertools.islice(shards, num_shards)", "shards"),
        ("itertools.islice(shards, num_shards)", "itertools.islice(shards, (num_shards or 99) + 1)"),
        ("train[:num_shards]]", "train]"),
        ('{"tokenizer.txt": parts[2]}', '{"tokenizer.txt": parts[-1]}'),
        ('{"tokenizer.txt": parts[2]}', '{"tokenizer.txt": parts[0]}'),
        ("max(1, sum(counts) // 20)", "max(1, sum(counts) // 19)"),
        ("counts[-2] if files[1:]", "counts[-1] if files[1:]"),
        ("if stop <= twentieth:", "if stop < 0:"),
        ("else (val[0], stop, None)", "else (val[0], stop + 1, None)"),
        ("(file.name == VAL_FILE, file.name == TEST_FILE)", "(file.name == TEST_FILE, file.name == VAL_FILE)"),
        ("{VAL_FILE} < {file.name for file in files} - {TEST_FILE}", "{VAL_FILE} <= {file.name for file in files}"),
        ("(TEST_FILE, VAL_FILE, *train)", "(VAL_FILE, TEST_FILE, *train)"),
        ("cuts = [0, 10_000,", "cuts = [0, 9_000,"),
        ("num_shards * 250_000, 250_000", "num_shards * 240_000, 240_000"),
        ("shape = [MAGIC, VOCAB_SIZE, EVAL_TOKENS,", "shape = [MAGIC, EVAL_TOKENS,"),
        ("SPLIT_PATTERN, SPECIAL_TOKENS, TOKENIZER_CHARS, TOKENIZER_DOC_CHARS]", "SPLIT_PATTERN, SPECIAL_TOKENS, TOKENIZER_CHARS]"),
        ('math.inf if name.startswith("train") else EVAL_TOKENS + 1', 'EVAL_TOKENS + 1'),
        ('math.inf if name.startswith("train") else EVAL_TOKENS + 1', 'math.inf'),
        ("else EVAL_TOKENS + 1", "else EVAL_TOKENS"),
        ("checksums + TokenStream(tokenizer, \"val\").checksums", "checksums"),
        ("if sizes[\"val\"] <= EVAL_TOKENS:", "if sizes[\"val\"] < 0:"),
        ("(errno.EMFILE, errno.ENFILE)", "(errno.ENFILE,)"),
        ('np.memmap(file, mode="r") if file.stat().st_size else b""', 'np.memmap(file, mode="r")'),
    ]),
    ("Preparing", "prepare.py", ["test_prepare.py", "-k", "run or shard or network or vain or text or tokenizer or batches"], [
        ("(?s:.{1,8191})(?:\\n|\\Z)|(?s:.{1,8192})", "(?s:.{1,8192})"),
        ("text[:TOKENIZER_DOC_CHARS]", "text"),
        ("if chars >= TOKENIZER_CHARS:", "if False:"),
        ("VOCAB_SIZE - len(SPECIAL_TOKENS)", "VOCAB_SIZE"),
        ("timeout=6", "timeout=60"),
        ("daemon=True).start()", "daemon=False).start()"),
        ("ids += [bos, *(", "ids += [*("),
        ("and read(cache_dir() / \"current\") == directory.name:", "and False:"),
        ("        if data or own:\n            raise", "        if data:\n            raise"),
        ("return make(\"embedded\", None)", "return prepare(\"embedded\", None)"),
        ("done.add(path.name)", "pass"),
        ("disallowed_special=()", "allowed_special='all'"),
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
