"""C1: how large is the KV cache of a request?

Closed form, from the config of every preset (`sim.models`), in 16 bits as papers count: what a long
sequence grows by with every token. *A few hundred MB* is taken as 200 to 500 (10^6 bytes).
"""

import pandas as pd
from matplotlib.figure import Figure

from claims import Claim, Verdict, one
from sim.kv_layout import KVLayout, kv_bytes_per_token_longctx, sequence_bytes
from sim.models import ModelSpec, get_model, model_names
from sim.plots.axis import new_figure
from sim.plots.style import PALETTE
from sim.plots.titles import put_title

FEW_HUNDRED_MB = (200, 500)
SHORT, LONG = 1024, 128 * 1024
NAMED = ("facebook/opt-13b", "meta-llama/Llama-3.1-8B", "deepseek-ai/DeepSeek-V3",
         "deepseek-ai/DeepSeek-V4-Flash")  # fmt: skip
DRAWN = (
    "facebook/opt-175b", *NAMED, "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.1-70B",
    "Qwen/Qwen3-235B-A22B", "google/gemma-3-27b-it", "openai/gpt-oss-120b",
    "Qwen/Qwen3-Next-80B-A3B-Instruct", "moonshotai/Kimi-K3",
)  # fmt: skip
KINDS = ("MHA", "GQA", "MLA", "hybrid", "compressed")


def kind_of(model: ModelSpec, layout: KVLayout) -> str:
    """Answer what sort of attention decides the size, one of `KINDS`."""
    kinds = {cache.kind for cache in layout.caches}
    if "compressed" in kinds:
        return "compressed"
    if kinds & {"sliding", "chunked", "state"}:
        return "hybrid"
    if "latent" in kinds:
        return "MLA"
    return "MHA" if model.num_key_value_heads == model.num_attention_heads else "GQA"


def formula_bytes(model: ModelSpec) -> int:
    """Answer layers * 2 * KV width * bytes, which is the KV of a token with plain attention."""
    return model.num_hidden_layers * 2 * model.num_key_value_heads * model.head_dim * 2


def make() -> pd.DataFrame:
    """Answer a row a preset, largest first."""
    rows = []
    for name in model_names():
        model = get_model(name)
        layout = model.layout
        of_bytes = kv_bytes_per_token_longctx(layout, kv_cache_dtype="bfloat16", stored_index=False)
        short, long = (
            sequence_bytes(layout, n, kv_cache_dtype="bfloat16", stored_index=False)
            for n in (SHORT, LONG)
        )
        rows.append(
            {
                "model": name,
                "attention": kind_of(model, layout),
                "bytes_per_token": of_bytes,
                "formula_bytes": formula_bytes(model),
                "mb_per_1000_tokens": of_bytes / 1000,
                "gib_of_128k_tokens": long / 2**30,
                "growth_1k_to_128k": long / short,
            }
        )
    return pd.DataFrame(rows).sort_values("bytes_per_token", ascending=False, kind="stable")


def judge(frame: pd.DataFrame) -> Verdict:
    """Count the presets that the rule of thumb is right for."""
    low, high = FEW_HUNDRED_MB
    sizes = frame["mb_per_1000_tokens"]
    right = int(sizes.between(low, high).sum())
    exact = frame["formula_bytes"] == frame["bytes_per_token"]
    kinds = " and ".join(sorted(set(frame[exact]["attention"]), key=KINDS.index))
    linear = int((frame["growth_1k_to_128k"] == LONG / SHORT).sum())
    least = sizes[sizes > 0].min()
    bytes_of = ", ".join(
        f"{name.partition('/')[2]} {one(frame, model=name)['bytes_per_token']:,}" for name in NAMED
    )
    held = "holds" if 2 * right > len(frame) else "does not hold"
    return Verdict(
        f"{held} as a rule of thumb: right for {right} of {len(frame)} models, up to "
        f"{low / least:.0f} times too high and {sizes.max() / high:.0f} too low. The formula gives "
        f"{int(exact.sum())} exactly ({kinds}); {linear} grow linearly with context",
        f"Bytes a token: {bytes_of}",
        "size by the model's config (`kvsim capacity --model`), never by a rule of thumb",
    )


def draw(frame: pd.DataFrame) -> Figure:
    """Draw MB per thousand tokens of some models beside the rule."""
    rows = frame[frame["model"].isin(DRAWN)].iloc[::-1]
    figure = new_figure(8, 4.6)
    axes = figure.subplots()
    colors = dict(zip(KINDS, PALETTE, strict=False))
    low, high = FEW_HUNDRED_MB
    axes.axvspan(low, high, color="#DDDDDD", zorder=0)
    axes.text((low * high) ** 0.5, len(rows) - 0.4, "the rule", ha="center", fontsize=9)
    sizes = rows["mb_per_1000_tokens"]
    names = [name.partition("/")[2] for name in rows["model"]]
    mine = [colors[kind] for kind in rows["attention"]]
    axes.hlines(names, sizes.min() / 2, sizes, color=mine, linewidth=1)
    axes.scatter(sizes, names, color=mine, zorder=2)
    labels = [
        f"{size:,.3g}  {kind}" if size < 1000 else f"{size:,.0f}  {kind}"
        for size, kind in zip(sizes, rows["attention"], strict=True)
    ]
    for size, name, label in zip(sizes, names, labels, strict=True):
        axes.annotate(
            label, (size, name), (7, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_xscale("log")
    axes.set_xlim(sizes.min() / 2, sizes.max() * 6)
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.set_xlabel("KV of a thousand tokens (MB, 16 bits)")
    most, least = rows.iloc[-1], rows.iloc[0]
    put_title(
        figure,
        f"KV of a token spans a factor of {most.bytes_per_token / least.bytes_per_token:,.0f}: "
        "no rule of thumb fits",
        "from the models' configs, closed form",
    )
    return figure


CLAIM = Claim(draw, judge, make=make)
