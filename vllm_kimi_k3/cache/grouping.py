"""Which layers share a block table, so that few pages of a block are left empty.

A block of the pool has as many pages as the largest group has layers. vLLM takes the smaller kind of layer as the size
of a group; a speculator's layers then make it larger than the KDA groups can fill.
"""

from collections.abc import Mapping

from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec, MambaSpec

#: Empty pages, of all pages of one block of each group, that are not worth a further group.
TOLERANCE = 0.05


def group_size(counts: list[int]) -> int:
    """Layers in a group, for so many layers of each kind.

    The largest size, so the fewest tables, that leaves at most :data:`TOLERANCE` of the pages empty.

    >>> group_size([24, 69]), group_size([29, 69])
    (24, 10)
    """
    layers = sum(counts)
    for size in range(max(counts), 0, -1):
        groups = sum(-(-count // size) for count in counts)
        if 1 - layers / (groups * size) <= TOLERANCE:
            return size
    raise ValueError(f"no layers to group: {counts}")


def groups_of(specs: Mapping[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    """Cache groups of layers whose pages have the same bytes.

    Layers of one spec are dealt out to their groups in turn, so the groups' sizes differ by one at most and each stage
    of a pipeline gets its share of every group. Groups of states come first: a request that ends keeps its last states
    before its rows are given up.

    Raises:
        ValueError: the pages differ, naming the sizes.
    """
    pages = {spec.page_size_bytes for spec in specs.values()}
    if len(pages) != 1:
        raise ValueError(f"cache pages of the layers differ: {sorted(pages)} bytes; pad them to one size first")
    kinds: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        kinds.setdefault(spec, []).append(name)
    size = group_size([len(names) for names in kinds.values()])
    return [
        KVCacheGroupSpec(names[index::count], spec)
        for spec, names in sorted(kinds.items(), key=lambda kind: not isinstance(kind[0], MambaSpec))
        for count in [-(-len(names) // size)]
        for index in range(count)
    ]
