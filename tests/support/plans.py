"""What a plan has to be, whoever made it; and what GPU's plans cut."""

CUT_FOR_CLUSTERS = [
    *((1, 16), (5, 16), (8, 16), (17, 16), (20, 16), (33, 16), (50, 16)),
    *((3, 8), (12, 8), (16, 8), (30, 5), (33, 8), (60, 8), (1, 100), (8, 64), (8, 128)),
]
"""Tokens and heads: on Hopper each token is cut into as many parts as a cluster has blocks."""
UNCUT_TOKENS = 40
"""So many are not, with 17 heads and more: kernels for many tokens serve them."""
TOKEN_UNITS = 3
"""What a token costs a worker besides its tiles, in tiles, where there are fewer than two workers for each token."""


def tiles_of(lengths, granule=16):
    return [-(-max(n, 0) // granule) for n in lengths]


def walk(table, tiles, granule_wanted=16):
    """Checks a table row by row against each token's tiles; returns the parts of each token."""
    position = (0, 0)  # token, tile
    parts = [0] * len(tiles)
    places = []
    for token_begin, token_end, tile_begin, tile_end, part, cut_into, place, granule in table.tolist():
        assert granule == granule_wanted
        if token_begin == token_end:
            continue
        assert (token_begin, tile_begin) == position, "a worker begins where the one before it ends"
        assert part == parts[token_begin]
        for token in range(token_begin, token_end):
            parts[token] += 1
        last = token_end - 1
        opens = tile_end < tiles[last]
        position = (last, tile_end) if opens else (token_end, 0)
        used = (tile_begin > 0) + (opens and not (tile_begin > 0 and token_end - token_begin == 1))
        places += range(place, place + used)
        if opens and not (tile_begin > 0 and token_end - token_begin == 1):
            assert cut_into > 1, "the worker that begins a cut token knows its parts"
        else:
            assert cut_into == 1
    assert position == (len(tiles), 0), "the last worker ends at the end"
    assert places == list(range(len(places))) and len(places) <= 2 * table.shape[0], "each partial result has a place"
    return parts
