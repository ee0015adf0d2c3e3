"""The pictures of the pipeline, drawn by code so that every chapter shows the same ones."""

from linattn_edu.figures.drawing import arrow as _arrow
from linattn_edu.figures.drawing import box as _box
from linattn_edu.figures.drawing import line as _line
from linattn_edu.figures.drawing import text as _text

STAGES = ("gate_cumsum", "solve", "wy", "state", "output")
BACKWARD = ("output_bwd", "state_bwd", "wy_bwd", "gate_bwd")
KDA_STAGES = ("gate_cumsum", "kda_intra", "wy", "state", "output")
KDA_BACKWARD = ("kda_scans", "kda_output_bwd", "kda_wy_bwd", "kda_intra_bwd", "gate_bwd")
SSD_STAGES = ("chunk_cumsum", "chunk_state", "state_passing", "chunk_scan")
SSD_BACKWARD = (
    "chunk_scan_bwd_dstates",
    "state_passing_bwd",
    "chunk_state_bwd_db",
    "chunk_scan_bwd_dc",
    "chunk_scan_chunk_state_bwd_dx",
    "chunk_scan_bwd_da_cs",
    "chunk_cumsum_bwd",
)
# of a layer on one rank of several; those that exchange something, or merge it
CP_STAGES = ("cp_conv", "piece_map", "cp_merge")
CP_BACKWARD = ("piece_map_bwd", "cp_merge_bwd")

# stage -> (top of its box, what it reads from the arguments, what it computes)
_BOXES = {
    "gate_cumsum": (46, "g", "decay inside the chunk"),
    "solve": (118, "k β", "inverse of the chunk"),
    "wy": (190, "k v β", "what the chunk writes"),
    "state": (262, "k S₀", "chunk to chunk"),
    "output": (334, "q k", "read state and chunk"),
}
# stage -> (top of its box, what it computes), each about where its forward stage is
_BACKWARD_BOXES = {
    "gate_bwd": (46, "decay of each token"),
    "wy_bwd": (136, "through the inverse"),
    "state_bwd": (226, "chunk to chunk, back"),
    "output_bwd": (316, "through the output"),
}
# the same of Kimi Delta Attention
_KDA_BOXES = {
    "gate_cumsum": (46, "g", "decay inside the chunk"),
    "kda_intra": (118, "q k β", "scores, inverse"),
    "wy": (190, "q k v β", "what the chunk writes"),
    "state": (262, "S₀", "chunk to chunk"),
    "output": (334, "", "read state and chunk"),
}
_KDA_BACKWARD_BOXES = {
    "gate_bwd": (46, "decay of each token"),
    "kda_intra_bwd": (126, "through the gate"),
    "kda_wy_bwd": (206, "through the inverse"),
    "kda_output_bwd": (286, "through the output"),
    "kda_scans": (366, "chunk to chunk, both"),
}
# the same of Mamba-2
_SSD_BOXES = {
    "chunk_cumsum": (46, "dt A", "step and decay"),
    "chunk_state": (126, "B x", "what the chunk writes"),
    "state_passing": (206, "S₀", "chunk to chunk"),
    "chunk_scan": (286, "C B x", "read state and chunk"),
}
_SSD_BACKWARD_BOXES = {
    "chunk_cumsum_bwd": (46, "step of each token"),
    "chunk_scan_bwd_da_cs": (124, "scores by their decay"),
    "chunk_scan_chunk_state_bwd_dx": (202, "scores and state by x"),
    "chunk_scan_bwd_dc": (280, "output by C, scores by B"),
    "chunk_state_bwd_db": (358, "state by B and its decay"),
    "state_passing_bwd": (436, "chunk to chunk, back"),
    "chunk_scan_bwd_dstates": (514, "output by the state"),
}
# the same of a rank of several
_CP_BOXES = {
    "cp_conv": (46, "short convolution"),
    "gate to wy": (128, "each rank by itself"),
    "piece_map": (210, "the piece as a map"),
    "gather": (292, "one message a rank"),
    "cp_merge": (374, "the state that enters"),
    "state, output": (456, "as on one rank"),
}
_CP_BACKWARD_BOXES = {
    "state_bwd, wy_bwd": (46, "as on one rank"),
    "cp_merge_bwd": (128, "gradient of S_out"),
    "gather": (210, "one message a rank"),
    "piece_map_bwd": (292, "its map, back in time"),
    "output_bwd": (374, "each rank by itself"),
}
# what is lit -> boxes: the file of a stage holds the map of a piece and the merge
_CP_LIT = {"cp_conv": ("cp_conv",), "cp_merge": ("piece_map", "cp_merge")}
_CP_BACKWARD_LIT = {"cp_merge_bwd": CP_BACKWARD}
_X, _WIDTH, _HEIGHT, _BUS = 70, 168, 44, 262
_SSD_KNOWN = ("ssd", "selective_state_update", *SSD_STAGES)
_KEPT = ("from what", "was kept:", "q k v g β", "gc A S₀")
_KDA_KEPT = ("from what", "was kept:", "q k v g β", "P A S₀")
_STYLE = (
    "svg.la-map{display:block;width:100%;max-width:430px;height:auto;margin:0.5em auto;"
    "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}"
)


def pipeline_svg(lit: str | None = None) -> str:
    """The pipeline of chunk_gated_delta_rule as SVG text, with one stage lit.

    Lines and letters take the colour of the surrounding text, so it fits a dark page.

    Args:
        lit: "recurrent", "gate_cumsum", "solve", "wy", "state", "output", or None for none; with
            "output_bwd", "state_bwd", "wy_bwd" or "gate_bwd" it is the drawing of backward_svg,
            with a stage of Kimi Delta Attention alone that of kda_svg or kda_backward_svg, with
            "ssd" or a stage of Mamba-2 that of ssd_svg or ssd_backward_svg, with "cp_conv" or
            "cp_merge" that of cp_svg, with "cp_merge_bwd" that of cp_backward_svg.
    """
    if lit in BACKWARD:
        return backward_svg(lit)
    if lit in KDA_BACKWARD:
        return kda_backward_svg(lit)
    if lit in _SSD_KNOWN:
        return ssd_svg(lit)
    if lit in SSD_BACKWARD:
        return ssd_backward_svg(lit)
    if lit in _CP_LIT:
        return cp_svg(lit)
    if lit in _CP_BACKWARD_LIT:
        return cp_backward_svg(lit)
    known = ("recurrent", *STAGES)
    if lit in KDA_STAGES and lit not in known:
        return kda_svg(lit)
    if lit is not None and lit not in known:
        every = dict.fromkeys((*known, *KDA_STAGES, *BACKWARD, *KDA_BACKWARD))
        every |= dict.fromkeys((*_SSD_KNOWN, *SSD_BACKWARD, *_CP_LIT, *_CP_BACKWARD_LIT))
        raise ValueError(f"lit must be one of {tuple(every)} or None, got {lit!r}")
    parts = []
    for name, (y, inputs, note) in _BOXES.items():
        middle = y + _HEIGHT / 2
        parts += _box(_X, y, _WIDTH, _HEIGHT, name, note, name == lit)
        side = middle - 9 if name == "state" else middle
        parts += _arrow([(6, side), (_X, side)])
        parts.append(_text(34, side - 6, inputs))
    state_y = _BOXES["state"][0] + _HEIGHT / 2 + 12
    parts += _arrow([(_X, state_y), (6, state_y)])
    parts.append(_text(34, state_y + 15, "final S"))
    x = _X + _WIDTH / 2
    for above, below, label in (
        ("solve", "wy", "A"),
        ("wy", "state", "w  u"),
        ("state", "output", "h  v_new"),
    ):
        parts += _arrow([(x, _BOXES[above][0] + _HEIGHT), (x, _BOXES[below][0])])
        parts.append(_text(x + 8, _BOXES[below][0] - 10, label, anchor="start"))
    right = _X + _WIDTH
    parts.append(_text(_BUS + 6, _BOXES["gate_cumsum"][0] + 48, "gc", anchor="start"))
    top = _BOXES["gate_cumsum"][0] + _HEIGHT / 2
    for name in ("wy", "state", "output"):
        end = _BOXES[name][0] + _HEIGHT / 2
        parts += _arrow([(right, top), (_BUS, top), (_BUS, end), (right, end)])
    bottom = _BOXES["output"][0] + _HEIGHT
    parts += _arrow([(x, bottom), (x, bottom + 32)])
    parts.append(_text(x, bottom + 48, "o"))
    parts += _definition(x, bottom, ["q k v g β  S₀"], "recurrent", "o", lit == "recurrent")
    return _svg(parts, 436, "Stages of chunk_gated_delta_rule", lit)


def kda_svg(lit: str | None = None) -> str:
    """The pipeline of chunk_kda as SVG text, with one stage lit.

    Args:
        lit: "recurrent", "gate_cumsum", "kda_intra", "wy", "state", "output", or None for none.
    """
    known = ("recurrent", *KDA_STAGES)
    if lit is not None and lit not in known:
        raise ValueError(f"lit must be one of {known} or None, got {lit!r}")
    parts = []
    for name, (y, inputs, note) in _KDA_BOXES.items():
        middle = y + _HEIGHT / 2
        parts += _box(_X, y, _WIDTH, _HEIGHT, name, note, name == lit)
        side = middle - 9 if name == "state" else middle
        if inputs:
            parts += [*_arrow([(6, side), (_X, side)]), _text(34, side - 6, inputs)]
    state_y = _KDA_BOXES["state"][0] + _HEIGHT / 2 + 12
    parts += _arrow([(_X, state_y), (6, state_y)])
    parts.append(_text(34, state_y + 15, "final S"))
    x, right = _X + _WIDTH / 2, _X + _WIDTH
    for above, below, label in (
        ("kda_intra", "wy", "A"),
        ("wy", "state", "w  u  kg"),
        ("state", "output", "h  v_new"),
    ):
        parts += _arrow([(x, _KDA_BOXES[above][0] + _HEIGHT), (x, _KDA_BOXES[below][0])])
        parts.append(_text(x + 8, _KDA_BOXES[below][0] - 10, label, anchor="start"))
    parts.append(_text(_BUS + 6, _KDA_BOXES["gate_cumsum"][0] + 36, "gc", anchor="start"))
    top = _KDA_BOXES["gate_cumsum"][0] + _HEIGHT / 2
    for name in ("kda_intra", "wy", "state"):
        end = _KDA_BOXES[name][0] + _HEIGHT / 2 - 9
        parts += _arrow([(right, top), (_BUS, top), (_BUS, end), (right, end)])
    end, bus = _KDA_BOXES["output"][0] + _HEIGHT / 2, _BUS + 22
    for name in ("kda_intra", "wy"):
        start = _KDA_BOXES[name][0] + _HEIGHT / 2 + 10
        parts += _arrow([(right, start), (bus, start), (bus, end), (right, end)])
    parts.append(_text(bus + 6, end - 26, "P  qg", anchor="start"))
    bottom = _KDA_BOXES["output"][0] + _HEIGHT
    parts += _arrow([(x, bottom), (x, bottom + 32)])
    parts.append(_text(x, bottom + 48, "o"))
    parts += _definition(x, bottom, ["q k v g β  S₀"], "recurrent", "o", lit == "recurrent")
    return _svg(parts, 436, "Stages of chunk_kda", lit)


def ssd_svg(lit: str | None = None) -> str:
    """The pipeline of mamba_chunk_scan_combined as SVG text, with stages lit.

    Args:
        lit: "chunk_cumsum", "chunk_state", "state_passing", "chunk_scan"; "ssd", all of these;
            "selective_state_update", the recurrence; or None for none.
    """
    if lit is not None and lit not in _SSD_KNOWN:
        raise ValueError(f"lit must be one of {_SSD_KNOWN} or None, got {lit!r}")
    x, right = _X + _WIDTH / 2, _X + _WIDTH
    middle = {name: y + _HEIGHT / 2 for name, (y, *_) in _SSD_BOXES.items()}
    parts = []
    for name, (y, inputs, note) in _SSD_BOXES.items():
        side = middle[name] - 9 if name == "state_passing" else middle[name]
        parts += _box(_X, y, _WIDTH, _HEIGHT, name, note, lit in (name, "ssd"))
        parts += [*_arrow([(6, side), (_X, side)]), _text(34, side - 6, inputs)]
    parts.append(_text(34, middle["chunk_scan"] + 16, "D z"))
    state_y = middle["state_passing"] + 12
    parts += [*_arrow([(_X, state_y), (6, state_y)]), _text(34, state_y + 15, "final S")]
    for above, below, label in (
        ("chunk_state", "state_passing", "s"),
        ("state_passing", "chunk_scan", "h"),
    ):
        end = _SSD_BOXES[below][0]
        parts += _arrow([(x, _SSD_BOXES[above][0] + _HEIGHT), (x, end)])
        parts.append(_text(x + 8, end - 13, label, anchor="start"))
    top = middle["chunk_cumsum"]
    for i, label in enumerate(("gc", "step")):
        parts.append(_text(_BUS + 6, top + 24 + 18 * i, label, anchor="start"))
    for name in SSD_STAGES[1:]:
        parts += _arrow([(right, top), (_BUS, top), (_BUS, middle[name]), (right, middle[name])])
    bottom = _SSD_BOXES["chunk_scan"][0] + _HEIGHT
    parts += [*_arrow([(x, bottom), (x, bottom + 32)]), _text(x, bottom + 48, "out")]
    reads, here = ["x dt A B C", "D z  S₀"], lit == "selective_state_update"
    parts += _definition(x, bottom, reads, "recurrence", "out", here)
    return _svg(parts, 388, "Stages of mamba_chunk_scan_combined", lit)


def _definition(
    x: float, bottom: float, reads: list[str], name: str, out: str, lit: bool
) -> list[str]:
    """The recurrence, to the right of stages in a column about x that end at `bottom`."""
    left, width = 302, 112
    centre = left + width / 2
    return [
        _text(x, 18, "in chunks", small=True),
        _text(centre, 18, "the definition", small=True),
        *(_text(centre, 84 - 18 * i, line) for i, line in enumerate(reversed(reads))),
        *_arrow([(centre, 92), (centre, 170)]),
        *_box(left, 170, width, 60, name, "token by token", lit),
        *_arrow([(centre, 230), (centre, bottom + 32)]),
        _text(centre, bottom + 48, f"{out}  final S"),
        _text((x + centre) / 2 - 6, bottom + 48, "="),
    ]


def backward_svg(lit: str | None = None) -> str:
    """The backward stages of chunk_gated_delta_rule as SVG text, with one of them lit.

    The first stage is at the bottom and the arrows go up, against those of pipeline_svg.

    Args:
        lit: "output_bwd", "state_bwd", "wy_bwd", "gate_bwd", one of the stages that are done again,
            "wy" or "state", or None for none.
    """
    known = (*BACKWARD, "wy", "state")
    if lit is not None and lit not in known:
        raise ValueError(f"lit must be one of {known} or None, got {lit!r}")
    x, right = _X + _WIDTH / 2, _X + _WIDTH
    middle = {name: y + _HEIGHT / 2 for name, (y, _) in _BACKWARD_BOXES.items()}
    parts = [_text(x, 18, "gradients", small=True)]
    for name, (y, note) in _BACKWARD_BOXES.items():
        parts += _box(_X, y, _WIDTH, _HEIGHT, name, note, name == lit)
    for name, label in (("gate_bwd", "dg"), ("wy_bwd", "dk dv"), ("output_bwd", "dq")):
        parts += _arrow([(_X, middle[name]), (6, middle[name])])
        parts.append(_text(36, middle[name] - 6, label))
    parts.append(_text(36, middle["wy_bwd"] + 16, "dβ"))
    y = middle["state_bwd"]
    parts += _arrow([(6, y - 9), (_X, y - 9)]) + _arrow([(_X, y + 9), (6, y + 9)])
    parts += [_text(34, y - 15, "do dht"), _text(36, y + 25, "dh0")]
    for below, above, label in (
        ("output_bwd", "state_bwd", "dv_new"),
        ("state_bwd", "wy_bwd", "dh  dv_new"),
        ("wy_bwd", "gate_bwd", "dgc"),
    ):
        end = _BACKWARD_BOXES[above][0] + _HEIGHT
        parts += _arrow([(x, _BACKWARD_BOXES[below][0]), (x, end)])
        parts.append(_text(x + 8, end + 28, label, anchor="start"))
    bottom = _BACKWARD_BOXES["output_bwd"][0] + _HEIGHT
    parts += _arrow([(x, bottom + 32), (x, bottom)])
    parts.append(_text(x, bottom + 48, "do"))
    start, end = middle["output_bwd"] - 11, middle["wy_bwd"] + 11
    parts += _arrow([(right, start), (_BUS, start), (_BUS, end), (right, end)])
    for label_y, label in ((y + 36, "dk"), (y + 52, "dgc")):
        parts.append(_text(_BUS + 6, label_y, label, anchor="start"))
    # the part of the forward pass that is done again, beside it
    left, width, edge = 318, 86, 414
    centre = left + width / 2
    parts.append(_text(centre, 18, "done again", small=True))
    parts += [_text(centre, 48 + 18 * i, line, small=True) for i, line in enumerate(_KEPT)]
    parts += _box(
        left, _BACKWARD_BOXES["state_bwd"][0], width, _HEIGHT, "wy", "k v β gc A", lit == "wy"
    )
    y_state = _BACKWARD_BOXES["output_bwd"][0]
    parts += _box(left, y_state, width, _HEIGHT, "state", "k gc S₀", lit == "state")
    parts += _arrow([(left, y), (right, y)])
    parts.append(_text(_BUS + 28, y - 6, "w"))
    parts += _arrow([(centre, y + _HEIGHT / 2), (centre, _BACKWARD_BOXES["output_bwd"][0])])
    parts.append(_text(centre + 8, y + 50, "w  u", anchor="start"))
    start, end = middle["output_bwd"] + 11, middle["wy_bwd"] - 11
    parts += _arrow([(left, start), (right, start)])
    parts += _arrow([(left + width, start), (edge, start), (edge, end), (right, end)])
    for label_y in (start + 20, end - 6):
        parts.append(_text(_BUS + 22, label_y, "h v_new", small=True))
    return _svg(parts, 420, "Backward stages of chunk_gated_delta_rule", lit)


def kda_backward_svg(lit: str | None = None) -> str:
    """The backward stages of chunk_kda as SVG text, with one of them lit; drawn as backward_svg.

    Args:
        lit: "kda_scans", "kda_output_bwd", "kda_wy_bwd", "kda_intra_bwd", "gate_bwd", or None.
    """
    if lit is not None and lit not in KDA_BACKWARD:
        raise ValueError(f"lit must be one of {KDA_BACKWARD} or None, got {lit!r}")
    boxes = _KDA_BACKWARD_BOXES
    x, right, inner, outer = _X + _WIDTH / 2, _X + _WIDTH, _X + _WIDTH + 16, _X + _WIDTH + 36
    middle = {name: y + _HEIGHT / 2 for name, (y, _) in boxes.items()}
    parts = [_text(x, 18, "gradients", small=True)]
    for name, (y, note) in boxes.items():
        parts += _box(_X, y, _WIDTH, _HEIGHT, name, note, name == lit)
    for name, label in (
        ("gate_bwd", "dg"), ("kda_intra_bwd", "dq dk"), ("kda_wy_bwd", "dv"), ("kda_scans", "dh0"),
    ):  # fmt: skip
        parts += _arrow([(_X, middle[name]), (6, middle[name])])
        parts.append(_text(36, middle[name] - 6, label))
    parts.append(_text(36, middle["kda_intra_bwd"] + 16, "dβ"))
    y = middle["kda_output_bwd"]
    parts += [*_arrow([(6, y), (_X, y)]), _text(34, y - 6, "do")]
    for below, above, label in (
        ("kda_scans", "kda_output_bwd", "h  v_new"),
        ("kda_wy_bwd", "kda_intra_bwd", "dkb dkg dL"),
        ("kda_intra_bwd", "gate_bwd", "dgc"),
    ):
        end = boxes[above][0] + _HEIGHT
        parts += _arrow([(x, boxes[below][0]), (x, end)])
        parts.append(_text(x + 8, end + 23, label, anchor="start"))
    bottom = boxes["kda_scans"][0] + _HEIGHT
    parts += _arrow([(x, bottom + 32), (x, bottom)])
    parts.append(_text(x, bottom + 48, "do dht"))
    # past the stages that do not read it
    for column, below, above, labels in (
        (inner, y, middle["kda_intra_bwd"], ("dqg", "dP")),
        (outer, middle["kda_scans"] - 11, middle["kda_wy_bwd"] + 8, ("h  dh", "v_new", "dv_new")),
    ):
        parts += _arrow([(right, below), (column, below), (column, above), (right, above)])
        for i, label in enumerate(labels):
            parts.append(_text(column + 6, above + 28 + 16 * i, label, anchor="start"))
    # the part of the forward pass that is done again, beside it; state is in kda_scans
    left, width = 310, 98
    centre = left + width / 2
    parts.append(_text(centre, 18, "done again", small=True))
    parts += [_text(centre, 48 + 18 * i, line, small=True) for i, line in enumerate(_KDA_KEPT)]
    parts += _box(left, boxes["kda_scans"][0], width, _HEIGHT, "wy", "q k v β gc A", False)
    y = middle["kda_scans"] + 11
    parts += [*_arrow([(left, y), (right, y)]), _text(274, y + 16, "w u kg qg", small=True)]
    return _svg(parts, 468, "Backward stages of chunk_kda", lit)


def ssd_backward_svg(lit: str | None = None) -> str:
    """The backward stages of mamba_chunk_scan_combined as SVG text, with one of them lit.

    The first stage is at the bottom and the arrows go up, against those of ssd_svg.

    Args:
        lit: One of SSD_BACKWARD, or None for none.
    """
    if lit is not None and lit not in SSD_BACKWARD:
        raise ValueError(f"lit must be one of {SSD_BACKWARD} or None, got {lit!r}")
    boxes, width = _SSD_BACKWARD_BOXES, 250
    x, right, inner, outer = _X + width / 2, _X + width, _X + width + 22, _X + width + 48
    middle = {name: y + _HEIGHT / 2 for name, (y, _) in boxes.items()}
    top, da_cs, dx, dc, db, passing, dstates = middle.values()
    parts = [_text(x, 18, "gradients", small=True)]
    for name, (y, note) in boxes.items():
        parts += _box(_X, y, width, _HEIGHT, name, note, name == lit, size=13)
    for y, label in ((dstates, "dy"), (passing, "dht"), (dc, "dy"), (dx, "dy"), (da_cs, "dy")):
        side = y if y in (dstates, da_cs) else y - 9
        parts += [*_arrow([(6, side), (_X, side)]), _text(34, side - 6, label)]
    for y, label in ((passing, "dh0"), (dc, "dC dB"), (dx, "dx dD"), (top, "ddt dA")):
        side = y if y == top else y + 9
        parts += [*_arrow([(_X, side), (6, side)]), _text(34, side + 16, label)]
    for below, above, label in (
        (dstates, passing, "dh_out"),
        (passing, db, "ds"),
        (db, dc, "dB_state"),
        (da_cs, top, "dgc"),
    ):
        parts += _arrow([(x, below - _HEIGHT / 2), (x, above + _HEIGHT / 2)])
        parts.append(_text(x + 8, (below + above) / 2 + 5, label, anchor="start"))
    parts += _arrow([(right, passing - 9), (inner, passing - 9), (inner, dx + 9), (right, dx + 9)])
    parts.append(_text(inner + 4, dx + 50, "ds", anchor="start"))
    # what the other stages say of dt: one line to the stage that gathers it
    for y, label in ((passing + 9, "dlast"), (db, "dgc"), (dc, "dgc"), (dx - 9, "dstep")):
        parts.append(f'<circle cx="{outer:g}" cy="{y:g}" r="2.5"/>')
        parts += [_line([(right, y), (outer, y)]), _text(outer + 5, y + 5, label, anchor="start")]
    parts.append(_text(outer + 5, db + 21, "dlast", anchor="start"))
    parts += _arrow([(outer, passing + 9), (outer, top), (right, top)])
    reads = "each reads what it needs of C B x step gc h"
    parts.append(_text(x, boxes["chunk_scan_bwd_dstates"][0] + _HEIGHT + 24, reads, small=True))
    return _svg(parts, 592, "Backward stages of mamba_chunk_scan_combined", lit)


def cp_svg(lit: str | None = None) -> str:
    """A layer on one rank of several, which holds a piece of a sequence, as SVG text.

    Args:
        lit: "cp_conv"; "cp_merge", the map of a piece and the merge; or None for none.
    """
    if lit is not None and lit not in _CP_LIT:
        raise ValueError(f"lit must be one of {tuple(_CP_LIT)} or None, got {lit!r}")
    boxes, lights = _CP_BOXES, _CP_LIT.get(lit, ())
    parts, middle = _cp_ranks(boxes, lights, "piece_map", "ranks before")
    left, right, x = _CP_OTHERS, _X + _WIDTH, _X + _WIDTH / 2
    y = middle["cp_conv"]
    parts += [*_arrow([(6, y), (_X, y)]), _text(34, y - 6, "q k v")]
    parts += [*_arrow([(left, y), (right, y)]), _text(left + 6, y - 3, "last tokens", "start")]
    parts.append(_text(left + 6, y + 15, "of a rank", "start"))
    y = middle["piece_map"]
    parts += [*_arrow([(6, y), (_X, y)]), _text(34, y - 6, "S₀")]
    for below, label in (
        ("gate to wy", "q k v"),
        ("piece_map", "k w u gc"),
        ("gather", "S_ext M"),
        ("cp_merge", "S_ext M of ranks before"),
        ("state, output", "S_in"),
    ):
        end = boxes[below][0]
        parts += _arrow([(x, end - 38), (x, end)])
        parts.append(_text(x + 8, end - 14, label, anchor="start"))
    bottom = boxes["state, output"][0] + _HEIGHT
    parts += [*_arrow([(x, bottom), (x, bottom + 32)]), _text(x, bottom + 48, "o")]
    start = boxes["piece_map"][0] + _HEIGHT
    parts += _arrow([(_CP_CENTRE, start), (_CP_CENTRE, start + 38)])
    parts.append(_text(_CP_CENTRE - 6, start + 24, "S_ext M", small=True, anchor="end"))
    return _svg(parts, bottom + 58, "A layer on one rank of several", lit)


def cp_backward_svg(lit: str | None = None) -> str:
    """The backward pass on one rank of several as SVG text.

    The first stage is at the bottom and the arrows go up, against those of cp_svg.

    Args:
        lit: "cp_merge_bwd", the map of a piece and the merge, or None for none.
    """
    if lit is not None and lit not in _CP_BACKWARD_LIT:
        raise ValueError(f"lit must be one of {tuple(_CP_BACKWARD_LIT)} or None, got {lit!r}")
    boxes, lights = _CP_BACKWARD_BOXES, _CP_BACKWARD_LIT.get(lit, ())
    parts, middle = _cp_ranks(boxes, lights, "piece_map_bwd", "ranks after")
    x = _X + _WIDTH / 2
    y = middle["state_bwd, wy_bwd"]
    parts += [*_arrow([(_X, y), (6, y)]), _text(36, y - 6, "dq dk"), _text(36, y + 16, "dv ..")]
    y = middle["piece_map_bwd"]
    parts += [*_arrow([(6, y), (_X, y)]), _text(34, y - 6, "dht")]
    for above, label in (
        ("state_bwd, wy_bwd", "dS_out"),
        ("cp_merge_bwd", "dS_ext dM of ranks after"),
        ("gather", "dS_ext dM"),
        ("piece_map_bwd", "dv_new"),
    ):
        end = boxes[above][0] + _HEIGHT
        parts += _arrow([(x, end + 38), (x, end)])
        parts.append(_text(x + 8, end + 26, label, anchor="start"))
    bottom = boxes["output_bwd"][0] + _HEIGHT
    parts += [*_arrow([(x, bottom + 32), (x, bottom)]), _text(x, bottom + 48, "do")]
    end = boxes["gather"][0] + _HEIGHT
    parts += _arrow([(_CP_CENTRE, end + 38), (_CP_CENTRE, end)])
    parts.append(_text(_CP_CENTRE - 6, end + 26, "dS_ext dM", small=True, anchor="end"))
    return _svg(parts, bottom + 58, "The backward pass on one rank of several", lit)


_CP_OTHERS, _CP_CENTRE = 296, 355  # left edge and middle of the other ranks' column


def _cp_ranks(boxes: dict, lights: tuple[str, ...], other: str, others: str):
    """The boxes of a rank, and of other ranks the one that sends; the middle of each."""
    parts = [
        _text(_X + _WIDTH / 2, 18, "this rank", small=True),
        _text(_CP_CENTRE, 18, others, small=True),
    ]
    for name, (y, note) in boxes.items():
        width = 414 - _X if name == "gather" else _WIDTH
        size = 13 if len(name) > 15 else 15
        parts += _box(_X, y, width, _HEIGHT, name, note, name in lights, size=size)
    parts += _box(_CP_OTHERS, boxes[other][0], 118, _HEIGHT, other, "of their piece", False, 13)
    return parts, {name: y + _HEIGHT / 2 for name, (y, _) in boxes.items()}


def _svg(parts: list[str], height: float, title: str, lit: str | None) -> str:
    title += f", {lit} lit" if lit else ""
    return (
        f'<svg class="la-map" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 420 {height}" '
        f'role="img" width="420" aria-label="{title}" fill="currentColor"><title>{title}</title>'
        f"<style>{_STYLE}</style>{''.join(parts)}</svg>"
    )
