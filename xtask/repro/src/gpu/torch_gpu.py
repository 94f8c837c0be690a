"""PyTorch's figures on the first CUDA device, as JSON lines: products in bf16 and f32, and a GPT-2 training step in bf16.

Arguments: layers heads width context vocabulary batch, then sizes of the products.
"""
import json
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

layers, heads, width, context, vocab, batch = map(int, sys.argv[1:7])
sizes = list(map(int, sys.argv[7:]))
torch.set_float32_matmul_precision("highest")


def seconds(work, repeats):
    """The median of some runs, each fenced."""
    work()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


for n in sizes:
    for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
        took = seconds(lambda: a @ b, 20)
        print(json.dumps({"bench": "gpu_gemm", "n": n, "dtype": name, "tflops": 2 * n**3 / took / 1e12}))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, heads, -1).transpose(1, 2) for y in self.qkv(self.ln_1(x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.proj(y)
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, x, y):
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        return F.cross_entropy(self.head(self.ln_f(self.blocks(h))).view(-1, vocab), y.view(-1))


torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
model = Gpt().cuda()
adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
x, y = (torch.randint(vocab, (batch, context), device="cuda") for _ in range(2))


def step():
    adamw.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adamw.step()
    return loss.item()


took = seconds(step, 10)
peak = torch.cuda.max_memory_allocated() - before
print(json.dumps({"bench": "gpu_step", "mode": "eager", "tok_s": batch * context / took, "peak_bytes": peak}))
