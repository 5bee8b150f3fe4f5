"""Edits of train.py, (old text, new text), that leave one mechanism out each. Parameters that nothing uses any more get
no gradient."""

EDITS = {
    "3-grams": ("NGRAMS = (2, 3", "NGRAMS = (2"),
    "4-grams": (", 4)  ", ",)  "),
    "induction embedding": ("x = x + torch.where(found.unsqueeze(-1), F.", "torch.where(found.unsqueeze(-1), F."),
    "x0": ("x = x + self.x0_lambda * x0", "pass"),
    "value embeddings": ("if self.value_embed is not None:\n            v", "if False:\n            v"),
    "gates of value embeddings": ("v + gate[:, :, H:] * value", "v + value"),
    "decay of value embeddings": ("VALUE_EMBED_DECAY = 0.003", "VALUE_EMBED_DECAY = 0.0  "),
    "head gates": ("self.shift) * gate[:, :, :H]", "self.shift)"),
    "residual lambdas": ("x = self.residual_lambda * x ", "x = x "),
    "shifted half keys": ("k = torch.where(self.slow, F.pad(k, (0, 0, 0, 0, 1, -1)), k)\n", "\n"),
    "shifted pieces": ("else (i % 2) * self.window // 2", "else 0"),
    "LeakyReLU^2, not ReLU^2": ("F.leaky_relu(x, 0.3)", "F.relu(x)"),
    "softcap": ("SOFTCAP = 12.0", "SOFTCAP = None"),
    "cautious decay": ("decay * p * (update * p >= 0)", "decay * p"),
}
