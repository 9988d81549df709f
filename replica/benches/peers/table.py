"""Tables of the figures of a run, for the terminal."""


def in_process_table(report):
    """Returns a table with a row per peer, ours first, and a column per cell: tokens/s, and p50 of single texts."""
    names = []
    for row in report["cells"]:
        names += [name for name in row["peers"] if name not in names]
    cells = [f"{row['mix']} {row['batch']}" for row in report["cells"]]
    lines = [("tokens/s (p50 ms at batch 1)", *cells)]
    for name in names:
        figures = []
        for row in report["cells"]:
            peer = row["peers"].get(name)
            lone = f" ({peer['p50_ms']:.1f})" if peer and row["batch"] == 1 else ""
            figures.append(f"{peer['tokens_per_second']:,.0f}{lone}" if peer else "")
        lines.append((name, *figures))
    for precision in ("f32", "int8"):
        ours = [row["peers"].get(f"meridian-{precision}", {}) for row in report["cells"]]
        if any("ratio" in cell for cell in ours):
            shown = (f"{cell['ratio']:.2f} x {short(cell['best_peer'])}" if "ratio" in cell else "" for cell in ours)
            lines.append((f"ours / best {precision} peer", *shown))
        if any("share_of_peak" in cell for cell in ours):
            shown = (f"{cell['share_of_peak']:.0%}" if "share_of_peak" in cell else "" for cell in ours)
            lines.append((f"ours, of the {precision} peak", *shown))
    return aligned(lines)


def http_table(report):
    """Returns a table with a row per server and number of callers."""
    lines = [("over HTTP", "callers", "texts/s", "p50 ms", "p99 ms", "ours / it")]
    for row in report["rows"]:
        ratio = f"{row['ratio']:.2f} x" if "ratio" in row else ""
        figures = (f"{row[key]:,.1f}" for key in ("per_second", "p50_ms", "p99_ms"))
        lines.append((row["server"], str(row["callers"]), *figures, ratio))
    return aligned(lines)


def short(name):
    """Returns the abbreviated name of a peer."""
    for long, brief in (("onnxruntime", "ort"), ("openvino", "ov"), ("sentence-transformers", "st")):
        name = name.replace(long, brief)
    return name


def aligned(lines):
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rows = []
    for line in lines:
        cells = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))
        rows.append("  ".join((line[0].ljust(widths[0]), *cells)).rstrip())
    return "\n" + "\n".join(rows) + "\n"
