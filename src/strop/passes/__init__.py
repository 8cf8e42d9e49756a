"""Rewrite graphs. PIPELINE is the one place that knows the order of the passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from strop.ir.affine import base_of
from strop.ir.graph import Graph, Node
from strop.ir.ops import Kind
from strop.options import Options, check_names
from strop.passes.activated_linear import activated_linear
from strop.passes.aligned_linear import aligned_linear
from strop.passes.bias_to_consumer import bias_to_consumer
from strop.passes.canonicalize import canonicalize
from strop.passes.cat_last import cat_last
from strop.passes.causal_masks import causal_masks
from strop.passes.channels_last import channels_last
from strop.passes.code_sums import code_sums
from strop.passes.dequantised_linear import dequantised_linear, left_in_floats
from strop.passes.dot_merge import dot_merge
from strop.passes.eight_bit import eight_bit_choice, eight_bit_products, left_exact
from strop.passes.eight_bit_attention import eight_bit_attention
from strop.passes.eight_bit_convs import eight_bit_convs
from strop.passes.gated_codes import gated_codes
from strop.passes.gated_linear import gated_linear
from strop.passes.grouped_heads import grouped_heads
from strop.passes.joined_calls import joined_calls
from strop.passes.joined_parts import joined_parts
from strop.passes.joined_products import joined_products
from strop.passes.linear_add import linear_add
from strop.passes.looked_up_rows import looked_up_rows
from strop.passes.low_rank_add import low_rank_add
from strop.passes.low_rank_pair import low_rank_pair
from strop.passes.normed_linear import normed_linear
from strop.passes.numeric_masks import numeric_masks
from strop.passes.pointwise_conv import gpu_pointwise_conv, pointwise_conv
from strop.passes.pooled_operands import pooled_operands
from strop.passes.product_sum import product_sum
from strop.passes.reduce_in_steps import reduce_in_steps
from strop.passes.row_masks import row_masks
from strop.passes.scaled_products import scaled_products
from strop.passes.spelled_gelu import spelled_gelu
from strop.passes.upsampled_conv import upsampled_conv

Pass = Callable[[Graph, Options], Graph]

PIPELINE: tuple[Pass, ...] = (
    canonicalize,  # no-ops away, equal nodes merged
    causal_masks,  # masks that are causal, of which attention knows
    numeric_masks,  # masks of marks as numbers, once for all attention that reads them
    row_masks,  # masks that are the same for all queries, as rows
    spelled_gelu,  # GELU that a model's code spells out, as one operator
    looked_up_rows,  # what is computed of a table, of the rows that are looked up
    dequantised_linear,  # products of dequantised values, by codes
    code_sums,  # products of int8 codes, by a kernel of ours
    scaled_products,  # products of e4m3 codes, as one call that reads bytes
    pointwise_conv,  # 1x1 convolution as GEMM; other biases to the consumer
    gpu_pointwise_conv,  # the same but for fp32, where libraries may convolve in TF32
    upsampled_conv,  # behind an upsampling: of the smaller picture, by sums of taps
    eight_bit_convs,  # convolutions in 8 bits, by codes with a scale for each pixel
    eight_bit_attention,  # attention that may be so, where a kernel for it is faster
    eight_bit_choice,  # which linears are computed in 8 bits, where that is allowed
    normed_linear,  # a linear and the batch norm that follows it, which a kernel of ours computes
    dot_merge,  # GEMMs of one input as one GEMM
    eight_bit_products,  # the linears in 8 bits, by codes
    low_rank_pair,  # a linear goes on over the factors of its adapters
    low_rank_add,  # elsewhere the product of an adapter's factors, added where it is multiplied up
    gated_codes,  # a product of codes and the gate that follows it, as one kernel
    gated_linear,  # a linear and the gate that follows it, which one kernel may be
    activated_linear,  # a linear and the GELU that follows it, which a library's GEMM computes
    aligned_linear,  # more columns of zeros, where rows of a result would begin anywhere
    joined_products,  # rows of several products in one buffer, of which attention reads some
    bias_to_consumer,  # biases into the kernels that read the results
    product_sum,  # sums with a linear in the place of what is added, by kernels of ours
    linear_add,  # other sums with a linear where its product is added up
    pooled_operands,  # what only a pool reads, computed where it looks
    grouped_heads,  # heads of keys that serve several of queries, read where they lie
    channels_last,  # memory order of every value, copies where an anchor needs one
    cat_last,  # what is computed of a cat of norms, before the cat
    reduce_in_steps,  # kept dims between reduced ones
    joined_calls,  # results of calls written where a cat has them
    joined_parts,  # pieces of a cat of norms stored where the cat has them
)
# Nine lookups cost a CPU more than a trip through its caches: the stem of ResNet takes 5.1 ms
# instead of 3.6.
ONLY_ON = {
    "activated_linear": "cuda",
    "aligned_linear": "cuda",
    "code_sums": "cpu",
    "dequantised_linear": "cpu",
    "eight_bit_attention": "cuda",
    "eight_bit_convs": "cuda",
    "pointwise_conv": "cpu",
    "pooled_operands": "cuda",
    "row_masks": "cpu",
    "gated_codes": "cuda",
    "gpu_pointwise_conv": "cuda",
    "gated_linear": "cuda",
    "grouped_heads": "cuda",
    "joined_calls": "cuda",
    "joined_products": "cuda",
    "linear_add": "cuda",
    "low_rank_add": "cuda",
    "low_rank_pair": "cuda",
    "normed_linear": "cuda",
    "numeric_masks": "cuda",
    "product_sum": "cuda",
    "upsampled_conv": "cuda",
}


@dataclass(frozen=True, slots=True)
class PassRecord:
    """Hold what one pass did, for ``explain``."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    graph: Graph | None = None  # what it made, where ``options.wants_graphs``
    notes: tuple[tuple[str, str], ...] = ()  # modules that it left out though asked, with reasons


def steps(device: str) -> tuple[Pass, ...]:
    """Return PIPELINE without the passes that only other devices have."""
    return tuple(s for s in PIPELINE if ONLY_ON.get(s.__name__, device) == device)


def run(
    graph: Graph, options: Options, device: str = "cuda"
) -> tuple[Graph, tuple[PassRecord, ...]]:
    """Run PIPELINE for a kind of device; ``options.disable`` names passes to skip (channels_last
    cannot be)."""
    check_names(
        options.disable, [*(step.__name__ for step in PIPELINE), "patterns"], "pass to disable:"
    )
    records = []
    for step in steps(device):
        if step.__name__ in options.disable:
            continue
        start, before = time.perf_counter(), len(graph.nodes)
        left = _left_out(graph, step, options)
        graph = _with_own_results(graph, step(graph, options))
        seconds = time.perf_counter() - start
        kept = graph if options.wants_graphs else None
        notes = tuple((node.origin, reason) for node, reason in left.items())
        records.append(PassRecord(step.__name__, seconds, before, len(graph.nodes), kept, notes))
    return graph, tuple(records)


def _left_out(graph: Graph, step: Pass, options: Options) -> Mapping[Node, str]:
    """Return the linears that a step leaves as they are though it is for such, with the reasons."""
    if step is eight_bit_choice:
        return left_exact(graph, options)
    return left_in_floats(graph) if step is dequantised_linear else {}


def _with_own_results(before: Graph, after: Graph) -> Graph:
    """Copy a result that a pass found to be an argument, or another result (``x * 1``): users may
    write into their results."""
    taken = dict(zip(after.inputs, before.inputs, strict=False))  # merged weights come last
    outputs = list(after.outputs)
    for number, (old, new) in enumerate(zip(map(base_of, before.outputs), outputs, strict=True)):
        if taken.setdefault(base_of(new), old) is not old:
            order = new.order if new.kind is not Kind.VIEW else None
            outputs[number] = Node(
                "copy", (new,), {"result": number}, new.shape, new.dtype, new.origin, order
            )
    added = tuple(o for o in dict.fromkeys(outputs) if o not in after.outputs)
    return replace(after, nodes=after.nodes + added, outputs=tuple(outputs)) if added else after
