"""The matrices around what mixes the tokens of a layer: attention and its many substitutes."""

from sim.hf_config.fields import Fields
from sim.hf_config.layers import Kind
from sim.hf_config.quant import Quantization
from sim.hf_config.shape import Shape
from sim.model_spec import Holders, WeightPart


class Counter:
    """Elements of a model's matrices, added up part by part."""

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization
        self._parts: dict[tuple[str, Holders], list[int]] = {}
        self.expert_shape: tuple[int, int] | None = None

    def add(self, name: str, elements: int, held_by: Holders = "ranks",
            active: int | None = None) -> None:  # fmt: skip
        """Count *elements* of part *name*, of which *active* are used by a token [all]."""
        counts = self._parts.setdefault((name, held_by), [0, 0])
        counts[0] += elements
        counts[1] += elements if active is None else active

    def parts(self) -> tuple[WeightPart, ...]:
        """Answer what was counted, with the bits of each part."""
        bits = {**self._quantization.bits, "output embedding": self._quantization.lm_head}
        pads = self.expert_shape if self._quantization.method == "mxfp4" else None
        return tuple(
            WeightPart(
                name=name,
                elements=elements,
                active=active,
                held_by=held_by,
                bits=bits.get(name, 0),
                padded=pads if name == "experts" else None,
            )
            for (name, held_by), (elements, active) in self._parts.items()
            if elements
        )


def count_mixer(counter: Counter, fields: Fields, shape: Shape, layer: int, kind: Kind) -> None:
    """Count the matrices around what mixes tokens in a layer."""
    if kind in {"mamba", "both"}:
        _mamba(counter, fields, shape.hidden)
    if kind == "linear":
        _linear(counter, fields, shape)
    elif kind == "conv":
        counter.add("linear attention", 4 * shape.hidden**2)
    elif fields.has("compress_ratios"):
        _compressed(counter, fields, shape, layer)
    elif kind in {"full", "sliding", "chunked", "cross", "both"}:
        if fields.integer("kv_lora_rank") is not None:
            _latent(counter, fields, shape, layer)
        else:
            _attention(counter, fields, shape, layer, kind)


def _attention(counter: Counter, fields: Fields, shape: Shape, layer: int, kind: Kind) -> None:
    heads, kv_heads = shape.heads[layer], shape.kv_heads[layer]
    key, value = shape.key_dims[layer], shape.value_dims[layer]
    shared = False
    if kind == "sliding":
        kv_heads = fields.integer("swa_num_key_value_heads") or kv_heads
    else:
        wide = fields.integer("global_head_dim")
        if wide is not None:
            key, value = wide, wide
            kv_heads = fields.integer("num_global_key_value_heads") or kv_heads
        shared = fields.flag("attention_k_eq_v")
    query = heads * key * (2 if fields.flag("attn_output_gate") else 1)
    share = fields.integer("share_q_dim")
    if share is not None:  # Step 3: a low rank between residual stream and query
        counter.add("attention", shape.hidden * share, "everyone")
        counter.add("attention", share * query)
        query = 0
    counter.add("attention", shape.hidden * (query + heads * value))
    counter.add("attention", shape.hidden * kv_heads * (key + (0 if shared else value)), "kv_heads")


def _latent(counter: Counter, fields: Fields, shape: Shape, layer: int) -> None:
    hidden, heads = shape.hidden, shape.heads[layer]
    rank, rope = (
        fields.needed("the latent", "kv_lora_rank"),
        fields.integer("qk_rope_head_dim", least=0),
    )
    nope = fields.integer("qk_nope_head_dim", least=0) or 0
    value = fields.integer("v_head_dim") or nope
    query_rank = fields.integer("q_lora_rank", least=0) or 0
    query = heads * (nope + (rope or 0))
    counter.add("attention", hidden * (query_rank + rank + (rope or 0)), "everyone")
    counter.add(
        "attention",
        (query_rank or hidden) * query + rank * heads * (nope + value) + heads * value * hidden,
    )
    if fields.flag("mla_use_output_gate"):
        counter.add("attention", hidden * heads * value)
    types = fields.items("indexer_types", length=shape.num_layers)
    if types is None or types[layer] == "full":
        _indexer(counter, fields, hidden, query_rank or hidden)


def _indexer(counter: Counter, fields: Fields, hidden: int, query_rank: int) -> None:
    width, heads = fields.integer("index_head_dim"), fields.integer("index_n_heads")
    if width is not None and heads is not None:
        counter.add("indexer", query_rank * heads * width + hidden * (width + heads), "everyone")


def _compressed(counter: Counter, fields: Fields, shape: Shape, layer: int) -> None:
    """Count DeepSeek-V4's attention: low ranks for queries and output, one latent, compressors."""
    hidden, heads, width = shape.hidden, shape.heads[layer], shape.key_dims[layer]
    query_rank = fields.needed("the query", "q_lora_rank")
    groups, rank = fields.integer("o_groups") or 1, fields.needed("the output", "o_lora_rank")
    ratio = (fields.integers("compress_ratios", length=shape.num_layers) or [])[layer]
    counter.add("attention", hidden * (query_rank + width), "everyone")
    counter.add(
        "attention", query_rank * heads * width + heads * width * rank + groups * rank * hidden
    )
    if ratio:
        counter.add("indexer", hidden * 2 * width * (2 if ratio == 4 else 1), "everyone")
    if ratio == 4:
        _indexer(counter, fields, 0, query_rank)
        index, index_heads = fields.integer("index_head_dim") or 0, fields.integer("index_n_heads")
        counter.add("indexer", hidden * (4 * index + (index_heads or 0)), "everyone")


def _mamba(counter: Counter, fields: Fields, hidden: int) -> None:
    heads = fields.integer("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    width = fields.integer("mamba_d_head", "mamba_head_dim", "mamba_headdim")
    state = fields.integer("mamba_d_state", "ssm_state_size", "state_size") or 0
    inner = fields.integer("mamba_d_ssm", "mamba_intermediate_size") or hidden * (
        fields.integer("mamba_expand", "expand") or 2
    )
    if heads is not None and width is not None:
        inner = heads * width
        groups = fields.integer("mamba_n_groups", "n_groups", "mamba_ngroups") or 1
        counter.add("mamba", hidden * (3 * inner + 2 * groups * state + heads))
        return
    rank = fields.integer("mamba_dt_rank", "time_step_rank") or -(-hidden // 16)
    counter.add("mamba", hidden * 3 * inner + inner * (2 * rank + 2 * state))


def _linear(counter: Counter, fields: Fields, shape: Shape) -> None:
    hidden = shape.hidden
    delta = fields.sub("linear_attn_config")
    if delta is not None and delta.has("num_heads"):
        heads, width = delta.needed("heads", "num_heads"), delta.needed("heads", "head_dim")
        inner = heads * width
        gate = hidden * inner if delta.flag("use_full_rank_gate") else width * (hidden + inner)
        counter.add(
            "linear attention", hidden * (4 * inner + heads) + gate + width * (hidden + inner)
        )
        return
    if fields.has("linear_num_value_heads"):
        key = (fields.integer("linear_num_key_heads") or 0) * (
            fields.integer("linear_key_head_dim") or 0
        )
        heads = fields.integer("linear_num_value_heads") or 0
        value = heads * (fields.integer("linear_value_head_dim") or 0)
        counter.add("linear attention", hidden * (2 * key + 3 * value + 2 * heads))
        return
    inner = shape.heads[0] * shape.key_dims[0]
    counter.add("linear attention", 5 * hidden * inner)
