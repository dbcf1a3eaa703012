"""Small hand-written models of well-known shapes; only their structure matters."""

import torch
import torch.nn.functional as F
from torch import nn


class Shell(nn.DataParallel):
    """A wrapper that adds `module.` to every name and stays on the host, also where there is a GPU."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self.module, self.device_ids = module, []


class Attention(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))


class Mlp(nn.Module):
    def __init__(self, width, ratio=4):
        super().__init__()
        self.up, self.down = nn.Linear(width, ratio * width), nn.Linear(ratio * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width, p=0.0):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp, self.drop = Attention(width), Mlp(width), nn.Dropout(p)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT2(nn.Module):
    """Embeddings, blocks in a ModuleDict, a head tied to the embedding."""

    def __init__(self, vocab=32, width=16, depth=6, length=16, p=0.0):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, width),
                "wpe": nn.Embedding(length, width),
                "h": nn.ModuleList([Block(width, p) for _ in range(depth)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens):
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](torch.arange(tokens.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class LlamaLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.self_attn = Attention(width)
        self.gate_proj, self.up_proj = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=False)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width), RMSNorm(width)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class LlamaInner(nn.Module):
    def __init__(self, vocab, width, depth):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList([LlamaLayer(width) for _ in range(depth)])
        self.norm = RMSNorm(width)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Llama(nn.Module):
    def __init__(self, vocab=32, width=16, depth=5):
        super().__init__()
        self.model = LlamaInner(vocab, width, depth)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.model(tokens))


class Bert(nn.Module):
    """Embeddings, an encoder with a `layer` list, a pooler."""

    def __init__(self, vocab=32, width=16, depth=4):
        super().__init__()
        self.embeddings = nn.ModuleDict({"word": nn.Embedding(vocab, width), "position": nn.Embedding(16, width)})
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList([Block(width) for _ in range(depth)])
        self.pooler = nn.Sequential(nn.Linear(width, width), nn.Tanh())


class T5Layer(nn.Module):
    def __init__(self, width, kind):
        super().__init__()
        self.layer_norm = RMSNorm(width)
        self.core = kind(width)


class SelfLayer(T5Layer):
    pass


class CrossLayer(T5Layer):
    pass


class FeedForwardLayer(T5Layer):
    pass


class T5Block(nn.Module):
    def __init__(self, width, is_decoder):
        super().__init__()
        layers = [SelfLayer(width, Attention)]
        layers += [CrossLayer(width, Attention)] if is_decoder else []
        self.layer = nn.ModuleList([*layers, FeedForwardLayer(width, Mlp)])


class T5Stack(nn.Module):
    def __init__(self, embedding, width, depth, is_decoder):
        super().__init__()
        self.embed_tokens = embedding
        self.block = nn.ModuleList([T5Block(width, is_decoder) for _ in range(depth)])
        self.final_layer_norm = RMSNorm(width)


class T5(nn.Module):
    """Encoder and decoder of one block class that share an embedding."""

    def __init__(self, vocab=32, width=16, depth=3):
        super().__init__()
        self.shared = nn.Embedding(vocab, width)
        self.encoder = T5Stack(self.shared, width, depth, False)
        self.decoder = T5Stack(self.shared, width, depth, True)
        self.lm_head = nn.Linear(width, vocab, bias=False)


class ViT(nn.Module):
    def __init__(self, width=16, depth=4, classes=10):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, width))
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class Tower(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])


class CLIP(nn.Module):
    """Two towers of one block class, and a scalar parameter."""

    def __init__(self):
        super().__init__()
        self.text_model, self.vision_model = Tower(16, 3), Tower(24, 4)
        self.text_projection, self.visual_projection = nn.Linear(16, 8, bias=False), nn.Linear(24, 8, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, text, image):
        for layer in self.text_model.layers:
            text = layer(text)
        for layer in self.vision_model.layers:
            image = layer(image)
        return self.logit_scale.exp() * self.text_projection(text).mean(1) @ self.visual_projection(image).mean(1).T


class Bottleneck(nn.Module):
    def __init__(self, channels, planes, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, planes, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv3, self.bn3 = nn.Conv2d(planes, 4 * planes, 1, bias=False), nn.BatchNorm2d(4 * planes)
        self.downsample = None
        if stride != 1 or channels != 4 * planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, 4 * planes, 1, stride, bias=False), nn.BatchNorm2d(4 * planes)
            )

    def forward(self, x):
        y = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return F.relu(self.bn3(self.conv3(y)) + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """Stages as numbered attributes, each a plain Sequential."""

    def __init__(self, depths=(3, 4, 6, 3), width=4, classes=10):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        channels = width
        for stage, depth in enumerate(depths):
            planes = width * 2**stage
            blocks = []
            for index in range(depth):
                blocks.append(Bottleneck(channels, planes, 2 if stage and not index else 1))
                channels = 4 * planes
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.num_stages = len(depths)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        for stage in range(self.num_stages):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.fc(x.mean((2, 3)))


class Stage(nn.Module):
    """A stage of a hierarchical transformer: blocks, then an optional merging layer."""

    def __init__(self, width, depth, merges, block=Block):
        super().__init__()
        self.blocks = nn.ModuleList([block(width) for _ in range(depth)])
        self.downsample = nn.Linear(width, 2 * width) if merges else nn.Identity()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.downsample(x)


class Swin(nn.Module):
    def __init__(self, width=8, depths=(2, 2, 6, 2)):
        super().__init__()
        self.patch_embed = nn.Linear(3, width)
        last = len(depths) - 1
        self.layers = nn.ModuleList([Stage(width * 2**i, depth, i < last) for i, depth in enumerate(depths)])
        self.norm, self.head = nn.LayerNorm(width * 2**last), nn.Linear(width * 2**last, 10)

    def forward(self, x):
        x = self.patch_embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv_dw = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.mlp = nn.LayerNorm(width), Mlp(width)
        self.gamma = nn.Parameter(torch.ones(width))


class ConvNeXtStage(nn.Module):
    def __init__(self, width, out, depth):
        super().__init__()
        self.blocks = nn.Sequential(*[ConvNeXtBlock(width) for _ in range(depth)])
        self.downsample = nn.Conv2d(width, out, 2, 2)


class ConvNeXt(nn.Module):
    def __init__(self, depths=(3, 3, 9, 3), width=4):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 4, 4), nn.GroupNorm(1, width))
        self.stages = nn.Sequential(
            *[ConvNeXtStage(width * 2**i, width * 2 ** (i + 1), depth) for i, depth in enumerate(depths)]
        )
        self.head = nn.Linear(width * 2 ** len(depths), 10)


class DoubleConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.body = nn.Sequential(
            *[nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()],
            *[nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()],
        )


class Down(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.pool_conv = nn.Sequential(nn.MaxPool2d(2), DoubleConv(inputs, outputs))


class Up(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.up, self.conv = nn.ConvTranspose2d(inputs, inputs // 2, 2, 2), DoubleConv(inputs, outputs)


class UNet(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.inc, self.outc = DoubleConv(3, width), nn.Conv2d(width, 2, 1)
        self.down1, self.down2 = Down(width, 2 * width), Down(2 * width, 4 * width)
        self.down3, self.down4 = Down(4 * width, 8 * width), Down(8 * width, 16 * width)
        self.up1, self.up2 = Up(16 * width, 8 * width), Up(8 * width, 4 * width)
        self.up3, self.up4 = Up(4 * width, 2 * width), Up(2 * width, width)


class Experts(nn.Module):
    """Experts that all see the same input, weighted by a router."""

    def __init__(self, width, count, has_router=True):
        super().__init__()
        self.router = nn.Linear(width, count) if has_router else None
        self.experts = nn.ModuleList([Mlp(width) for _ in range(count)])

    def forward(self, x):
        weights = self.router(x).softmax(-1) if self.router is not None else x.new_ones(len(self.experts))
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class MoEBlock(nn.Module):
    def __init__(self, width, count, has_router=True):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.moe = Attention(width), Experts(width, count, has_router)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.moe(self.norm2(x))


class MoE(nn.Module):
    def __init__(self, width=16, depth=3, count=4, has_router=True):
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList([MoEBlock(width, count, has_router) for _ in range(depth)])
        self.head = nn.Linear(width, 32)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
