"""The same allocator written the slow, obvious way: lists of pieces, searched from end to end.

Only the default rules (no oversize blocks, no collection, no division rounding), native and expandable.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 2**20
ENDLESS = 2**45


@dataclass(eq=False)
class Piece:
    size: int
    state: str  # live, free or unmapped
    requested: int = 0


@dataclass(eq=False)
class Segment:
    pieces: list[Piece] = field(default_factory=list)

    def room(self, piece: Piece) -> int:
        after = self.pieces[self.pieces.index(piece) + 1 :]
        return piece.size + (after[0].size if after and after[0].state == "unmapped" else 0)

    def tidy(self) -> None:
        merged: list[Piece] = []
        for piece in self.pieces:
            if merged and piece.state == merged[-1].state != "live":
                merged[-1].size += piece.size
            else:
                merged.append(piece)
        self.pieces = merged

    def split(self, piece: Piece, *sizes: int) -> list[Piece]:
        parts = [Piece(size, piece.state) for size in sizes if size]
        index = self.pieces.index(piece)
        self.pieces[index : index + 1] = parts
        return parts


class PlainAllocator:
    def __init__(self, *, expandable: bool, limit_bytes: int | None) -> None:
        self.expandable = expandable
        self.limit_bytes = ENDLESS if limit_bytes is None else limit_bytes
        self.pools: dict[bool, list[Segment]] = {True: [], False: []}
        if expandable:
            self.pools = {small: [Segment([Piece(ENDLESS, "unmapped")])] for small in (True, False)}
        self.retries = 0

    def total(self, *states: str) -> int:
        segments = [segment for pool in self.pools.values() for segment in pool]
        return sum(piece.size for segment in segments for piece in segment.pieces if piece.state in states)

    @property
    def reserved_bytes(self) -> int:
        return self.total("live", "free")

    def allocate(self, nbytes: int) -> Piece | None:
        size = max(-(-nbytes // 512), 1) * 512
        small = size <= MIB
        found = self.best(small, size) or self.grow(small, size)
        if found is None:
            self.empty_cache()
            self.retries += 1
            found = self.grow(small, size)
        if found is None:
            return None
        segment, piece = found
        if piece.size - size > (0 if small or self.expandable else MIB):
            piece = segment.split(piece, size, piece.size - size)[0]
        piece.state, piece.requested = "live", nbytes
        return piece

    def best(self, small: bool, size: int) -> tuple[Segment, Piece] | None:
        fits = [(s, p) for s in self.pools[small] for p in s.pieces if p.state == "free" and p.size >= size]
        fits.sort(key=lambda found: found[1].size)  # stable, so lower addresses first
        while self.expandable and len(fits) > 1 and fits[1][0].room(fits[1][1]) < fits[0][0].room(fits[0][1]):
            del fits[0]
        return fits[0] if fits else None

    def grow(self, small: bool, size: int) -> tuple[Segment, Piece] | None:
        if self.expandable:
            return self.map(small, size)
        nbytes = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved_bytes + nbytes > self.limit_bytes:
            return None
        segment = Segment([Piece(nbytes, "free")])
        self.pools[small].append(segment)
        return segment, segment.pieces[0]

    def map(self, small: bool, size: int) -> tuple[Segment, Piece] | None:
        segment = self.pools[small][0]
        page = 2 * MIB if small else 20 * MIB
        start = next(at for at, piece in enumerate(segment.pieces) if self.run(segment, at) >= size and piece)
        while segment.pieces[start].state != "free" or segment.pieces[start].size < size:
            have = segment.pieces[start].size if segment.pieces[start].state == "free" else 0
            gap = segment.pieces[start + 1] if have else segment.pieces[start]
            nbytes = min(-(-(size - have) // page) * page, gap.size)
            if self.reserved_bytes + nbytes > self.limit_bytes:
                return None
            segment.split(gap, nbytes, gap.size - nbytes)[0].state = "free"
            segment.tidy()
        return segment, segment.pieces[start]

    def run(self, segment: Segment, start: int) -> int:
        """Bytes free or unmapped from here on, 0 where memory need not be mapped at once."""
        states = [piece.state for piece in segment.pieces[start : start + 2]]
        if states[0] != "unmapped" and states != ["free", "unmapped"]:
            return 0
        total = 0
        for piece in segment.pieces[start:]:
            if piece.state == "live":
                break
            total += piece.size
        return total

    def free(self, piece: Piece) -> None:
        piece.state = "free"
        for pool in self.pools.values():
            for segment in pool:
                segment.tidy()

    def empty_cache(self) -> None:
        for small, pool in self.pools.items():
            if self.expandable:
                self.unmap(pool[0], 2 * MIB if small else 20 * MIB)
            else:
                self.pools[small] = [s for s in pool if [p.state for p in s.pieces] != ["free"]]

    def unmap(self, segment: Segment, page: int) -> None:
        address = 0
        for piece in list(segment.pieces):
            begin, end = -(-address // page) * page, (address + piece.size) // page * page
            if piece.state == "free" and begin < end:
                before, after = begin - address, address + piece.size - end
                parts = segment.split(piece, before, end - begin, after)
                parts[1 if before else 0].state = "unmapped"
            address += piece.size
        segment.tidy()
