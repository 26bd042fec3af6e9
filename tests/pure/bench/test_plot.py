import re
from xml.etree import ElementTree

import pytest

from shoal.bench.plot import ABOVE, HEIGHT, LEFT, WIDTH, Panel, svg

NAMES = {"s": "http://www.w3.org/2000/svg"}


def panel(**changes: object) -> Panel:
    lines = {"a < b": [(0.0, 0.0), (5.0, 1.0), (10.0, 2.0)], "c": [(0.0, 2.0), (10.0, 2.0)]}
    given = {"title": "cost & more", "x_name": "x", "y_name": "ms", "lines": lines}
    return Panel(**{**given, **changes})  # type: ignore[arg-type]


def test_points_are_where_their_values_are() -> None:
    root = ElementTree.fromstring(svg([panel()]))
    first, *_ = root.findall(".//s:path[@fill='none']", NAMES)
    places = re.findall(r"([\d.]+) ([\d.]+)", first.attrib["d"])
    (x0, y0), (x1, y1), (x2, y2) = [(float(x), float(y)) for x, y in places]
    assert (x0, x1, x2) == (0, WIDTH / 2, WIDTH)
    assert y0 == HEIGHT
    assert 0 < y2 < HEIGHT / 10, "a little air above"
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)


def test_a_logarithmic_axis_spreads_what_doubles() -> None:
    line = {"a": [(8.0, 1.0), (64.0, 1.0), (512.0, 1.0)]}
    root = ElementTree.fromstring(svg([panel(lines=line, log_x=True)]))
    circles = root.findall(".//s:circle", NAMES)
    assert [float(one.attrib["cx"]) for one in circles] == [0, WIDTH / 2, WIDTH]


def test_panels_share_a_legend_and_colours() -> None:
    other = panel(lines={"c": [(0.0, 1.0), (1.0, 2.0)]}, note="with 4 of them")
    text = svg([panel(), other])
    root = ElementTree.fromstring(text)
    words = [one.text for one in root.iter(f"{{{NAMES['s']}}}text")]
    assert words.count("a < b") == words.count("c") == 1
    assert {"cost & more", "with 4 of them"} <= set(words)
    strokes = [one.attrib["stroke"] for one in root.findall(".//s:path[@fill='none']", NAMES)]
    assert strokes[1] == strokes[2] != strokes[0]
    groups = root.findall("s:g", NAMES)
    assert groups[0].attrib["transform"] == f"translate({LEFT},{ABOVE})"
