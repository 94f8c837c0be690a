"""PyTorch's figures of one training step on the CPU (forward, loss, backward, clip, fused AdamW), as JSON lines.

Arguments: CONFIG (nano, baby, gpt2-124M or llama-124m), threads, seconds. For `cargo xtask bench llama-step --beside
'python3 xtask/repro/src/training_step/torch_step.py $CONFIG $THREADS 3'`, which needs PyTorch in python3.

There are two lines: one with glibc's default settings, and one where freed memory is kept. The second is the faster
one and varies less, since the first asks the system for new pages at each step; the first needs less memory.
"""
import json
import os
import resource
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

# Layers, heads, width, context, vocabulary, batch, and the inner width of LLaMA's feed-forward network.
CONFIGS = {
    "nano": (4, 4, 128, 64, 256, 12, None),
    "baby": (6, 6, 384, 256, 256, 8, None),
    "gpt2-124M": (12, 12, 768, 256, 50257, 1, None),
    "llama-124m": (12, 12, 768, 256, 50257, 1, 2048),
}
# Settings of glibc with which freed memory is kept.
KEPT = {"MALLOC_MMAP_THRESHOLD_": "8000000000", "MALLOC_TRIM_THRESHOLD_": "16000000000", "MALLOC_TOP_PAD_": "1000000000"}
config, threads, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
layers, heads, width, context, vocab, batch, inner = CONFIGS[config]
torch.set_num_threads(threads)
torch.manual_seed(1337)


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, context, width)


def split(x):
    return x.view(batch, context, heads, -1).transpose(1, 2)


class GptBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, _):
        q, k, v = map(split, self.qkv(self.ln_1(x)).split(width, 2))
        x = x + self.proj(attend(q, k, v))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


def turn(x, angles):
    """Rotates the halves of each head by position."""
    cos, sin = angles
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class LlamaBlock(nn.Module):
    def __init__(self):
        super().__init__()
        linear = lambda a, b: nn.Linear(a, b, bias=False)
        self.ln_1, self.ln_2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.q, self.k, self.v, self.proj = (linear(width, width) for _ in range(4))
        self.gate, self.up, self.down = linear(width, inner), linear(width, inner), linear(inner, width)

    def forward(self, x, angles):
        h = self.ln_1(x)
        q, k, v = split(self.q(h)), split(self.k(h)), split(self.v(h))
        x = x + self.proj(attend(turn(q, angles), turn(k, angles), v))
        h = self.ln_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = None if inner else nn.Embedding(context, width)
        self.blocks = nn.ModuleList((LlamaBlock if inner else GptBlock)() for _ in range(layers))
        self.ln_f = nn.RMSNorm(width, 1e-5) if inner else nn.LayerNorm(width)
        half = width // heads // 2
        angles = torch.outer(torch.arange(context), 10000.0 ** (-torch.arange(half) / half)).repeat(1, 2)
        self.angles = (angles.cos(), angles.sin())
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, 0, 0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens)
        if self.wpe is not None:
            x = x + self.wpe.weight
        for block in self.blocks:
            x = block(x, self.angles)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, vocab), targets.view(-1))


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


model = Model()
groups = [[p for p in model.parameters() if (p.dim() == 2) == matrix] for matrix in (True, False)]
adamw = torch.optim.AdamW(
    [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}],
    lr=1e-3, betas=(0.9, 0.95), fused=True,
)
tokens, targets = (torch.randint(0, vocab, (batch, context)) for _ in range(2))
after_init = peak_mib()


def step():
    loss = model(tokens, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adamw.step()
    adamw.zero_grad(set_to_none=True)


for _ in range(2):
    step()
times, begun = [], time.perf_counter()
while len(times) < 3 or time.perf_counter() - begun < seconds:
    start = time.perf_counter()
    step()
    times.append(time.perf_counter() - start)
kept = KEPT.keys() <= os.environ.keys()
# The second process would count the first one's memory.
memory = {} if kept else {"peak_rss_mb": round(peak_mib()), "rss_after_init_mb": round(after_init)}
print(json.dumps({
    "bench": "llama_step" if inner else "gpt_step",
    "config": config,
    "threads": threads,
    "mode": "eager",
    "malloc": "kept" if kept else "default",
    "parameters": sum(p.numel() for p in model.parameters()),
    "tok_s": round(batch * context / sorted(times)[len(times) // 2], 1),
    **memory,
}), flush=True)
if not kept:
    del model, adamw, groups
    subprocess.run([sys.executable, *sys.argv], env=os.environ | KEPT, check=True)
