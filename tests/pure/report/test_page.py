import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pure.report.runs import ACTIONS, make_run, step_line
from shoal.cli.report import main
from shoal.errors import UsageError
from shoal.report import write_report

VOID = {"meta", "br", "path", "rect", "link", "img", "input"}


class Outline(HTMLParser):
    """Checks that tags close in order, and collects titles, scripts and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif not self.open or self.open[-1] != "style":
            self.text += data


def outline(folder: Path) -> Outline:
    parser = Outline()
    parser.feed(write_report(folder).read_text())
    parser.close()
    assert parser.open == []
    return parser


def plots(page: Outline) -> list[dict[str, list[Any]]]:
    return [json.loads(script) for script in page.scripts if script.startswith("{")]


def test_a_full_run_has_every_section_and_its_numbers(tmp_path: Path) -> None:
    lines = [step_line(step) for step in range(1, 31)]
    lines.append('{"kind":"validation","step":20,"loss":0.2}\n')
    lines.append('{"kind":"validation","step":30,"loss":0.25}\n')
    page = outline(make_run(tmp_path / "first run", lines=lines))
    assert page.titles == [
        "Loss",
        "Learning rate",
        "Gradient norm",
        "Where the step's time goes",
        "Memory per rank",
        "The schedule of one step",
        "Generated sample",
        "This run",
        "Resolved config",
    ]
    for expected in (
        "first run",
        "0.1667",
        "0.2500",
        "best 0.2000 at 20",
        "20 k",
        "6.34 M",
        "6.00 s",
        "in 30 training steps, 123 k tokens",
        "150 ms · 75 %",
        "30.0 ms · 15 %",
        "310 MiB",
        "nats per token",
        "time of a step, ms",
        "time in the step, ms",
        "def f():",
        '"dim": 256',
    ):
        assert expected in page.text, expected
    assert "missing" not in {value for _, name, value in page.attributes if name == "class"}


def test_nothing_is_fetched_from_anywhere(tmp_path: Path) -> None:
    html = write_report(make_run(tmp_path)).read_text()
    assert not re.search(r"https?:|//[a-z]|\bsrc\s*=|@import|url\(|<link|<img|<iframe", html)
    assert "default-src 'none'" in html


def test_text_of_the_run_stays_text(tmp_path: Path) -> None:
    evil = "\" onload=x '></pre></script><script>alert('1')</script>"
    evil += "<img src=x onerror=alert(2)>\"'&amp;"
    actions = [{"kind": "forward", "unit": evil, "start_us": 0, "end_us": 5}]
    run = make_run(
        tmp_path / "<b>&x",
        sample=evil,
        config={"device": evil, evil: [evil]},
        actions=actions,
        lines=[step_line(1), json.dumps({"kind": evil, "step": 1}) + "\n"],
    )
    page = outline(run)
    plain = outline(make_run(tmp_path / "plain", lines=[step_line(1)]))
    assert len(page.scripts) == len(plain.scripts)
    assert not {name for _, name, _ in page.attributes if name.startswith("on")}
    assert "img" not in {tag for tag, _, _ in page.attributes}
    assert page.text.count(evil) >= 3
    assert "<b>&x" in page.text


def test_hover_data_cannot_end_its_script(tmp_path: Path) -> None:
    html = write_report(make_run(tmp_path)).read_text()
    starts = html.count("<script")
    assert html.count("</script>") == starts
    assert len(plots(outline(tmp_path))) == starts - 1


def test_nan_is_a_gap_and_is_mentioned(tmp_path: Path) -> None:
    losses = {10: float("nan"), 11: float("inf")}
    lines = [step_line(step, loss=losses.get(step, 2.0)) for step in range(1, 31)]
    page = outline(make_run(tmp_path / "run", lines=lines))
    assert "The training loss of 2 steps is not a finite number (step 10, 11)" in page.text
    (training,) = [
        value
        for tag, name, value in page.attributes
        if tag == "path" and name == "d" and value is not None and value.count("L") == 2
    ][:1]
    assert training.count("M") == 2
    assert plots(page)[0]["marks"][9][2][0] == "NaN"
    assert not re.search(r"\b(nan|inf)\b", write_report(tmp_path / "run").read_text())


def test_a_null_loss_is_a_gap_as_nan_is(tmp_path: Path) -> None:
    lines = [step_line(step) for step in range(1, 11)]
    lines[4] = step_line(5, loss=None, grad_norm=None)
    page = outline(make_run(tmp_path, lines=lines))
    assert "The training loss of 1 step is not a finite number (step 5)" in page.text
    assert "could be read" not in page.text


def resumed_run(folder: Path, *, at: list[int], last: int = 40) -> Outline:
    slow: dict[str, object] = {"compute_ms": 9000.0, "step_ms": 9050.0}
    lines: list[str] = []
    for step in range(1, last + 1):
        slow_now = slow if step == 1 or step - 1 in at else {}
        ranks = 2 if not at or step <= at[0] else 4
        lines.append(step_line(step, memory_bytes=[2**20] * ranks, **slow_now))
        if step in at:
            lines.append(json.dumps({"kind": "resume", "step": step, "num_ranks": 4}) + "\n")
    return outline(make_run(folder, lines=lines))


def test_resumes_are_marked_and_their_first_steps_left_out_of_the_mean(tmp_path: Path) -> None:
    page = resumed_run(tmp_path, at=[10, 38])
    (flags,) = [
        value
        for (tag, name, value) in page.attributes
        if tag == "path" and name == "d" and value is not None and value.endswith("V1000")
    ]
    assert flags == f"M{9 / 39 * 1000:.1f} 0V1000M{37 / 39 * 1000:.1f} 0V1000"
    words = [value for _, name, value in page.attributes if name == "class" and value is not None]
    assert [word for word in words if word.startswith("flag-word")] == [
        "flag-word",
        "flag-word before",
    ]
    assert (
        "Mean of 37 steps, without the first and the first after each resume: 200 ms." in page.text
    )
    assert "Ranks2, then 4resumed 2 times" in page.text


def test_words_of_resumes_close_together_do_not_lie_on_each_other(tmp_path: Path) -> None:
    page = resumed_run(tmp_path, at=[10, 11, 12, 13])
    assert page.text.count("resumed") == 2  # one word in the chart, one in the tile
    assert "resumed 4 times" in page.text


def test_a_run_that_was_never_resumed_has_no_flag(tmp_path: Path) -> None:
    page = resumed_run(tmp_path, at=[])
    assert "resume" not in page.text
    assert "flag" not in {value for _, name, value in page.attributes if name == "class"}


def test_a_small_chart_does_not_repeat_the_title_of_its_card(tmp_path: Path) -> None:
    lines = [step_line(step, grad_norm=10.0**-step) for step in range(1, 9)]
    page = outline(make_run(tmp_path, lines=lines))
    assert "learning rate" not in page.text
    assert "Gradient normlogarithmic" in page.text.replace("\n", "")


def test_a_run_without_one_finite_loss(tmp_path: Path) -> None:
    page = outline(make_run(tmp_path, lines=[step_line(1, loss=float("nan"))]))
    assert "No step has a finite loss." in page.text


def test_one_step(tmp_path: Path) -> None:
    page = outline(make_run(tmp_path, lines=[step_line(1)]))
    assert plots(page)[0]["marks"] == [[0.5, "step 1", ["5.000"]]]
    assert "in 1 training step" in page.text


def test_thousands_of_steps_make_a_page_of_bounded_size(tmp_path: Path) -> None:
    short = make_run(tmp_path / "short", lines=[step_line(i) for i in range(1, 2001)])
    long = make_run(tmp_path / "long", lines=[step_line(i) for i in range(1, 20_001)])
    sizes = [write_report(folder).stat().st_size for folder in (short, long)]
    assert sizes[1] < 1.2 * sizes[0]
    assert sizes[1] < 300_000


def test_a_slow_first_step_is_cut_and_named(tmp_path: Path) -> None:
    lines = [step_line(1, compute_ms=9000.0, step_ms=9050.0)]
    lines += [step_line(step) for step in range(2, 31)]
    page = outline(make_run(tmp_path, lines=lines))
    assert "the slowest step, 1, took 9.05 s" in page.text
    assert "Mean of 29 steps after the first: 200 ms." in page.text
    assert [value for _, name, value in page.attributes if name == "class"].count("cut") == 1


def test_missing_files_are_said_and_nothing_else_fails(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    page = outline(tmp_path)
    for message in (
        "No training step was recorded",
        "No learning rate was recorded",
        "not recorded in parts",
        "No rank reported its memory",
        "no readable timeline.json",
        "there is no sample.txt",
    ):
        assert message in page.text


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, lines=[step_line(1), "nonsense\n"] * 20)
    (run / "config.json").write_text("{")
    (run / "timeline.json").write_text("[]")
    page = outline(run)
    assert "config.json cannot be read" in page.text
    assert "timeline.json cannot be read: expected an object with a list 'actions'" in page.text
    assert "metrics.jsonl, line 2: not JSON" in page.text
    assert "… and 10 more like these" in page.text


def test_many_ranks_show_the_highest(tmp_path: Path) -> None:
    memory = [(100 + rank) * 2**20 for rank in range(40)]
    page = outline(make_run(tmp_path, lines=[step_line(1, memory_bytes=memory)]))
    assert "The 16 highest of 40 ranks; the lowest has 100 MiB." in page.text
    assert "rank 39" in page.text
    assert "rank 23" not in page.text


def test_a_line_of_many_ranks_beside_many_steps_takes_no_time(tmp_path: Path) -> None:
    lines = [step_line(step) for step in range(1, 9000)]
    folder = make_run(tmp_path, lines=[*lines, step_line(9000, memory_bytes=[1.0] * 100_000)])
    began = time.process_time()
    write_report(folder)
    assert time.process_time() - began < 10


def test_a_number_of_parameters_beyond_any_float_is_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder / "config.json").write_text('{"num_parameters": 1' + "0" * 4000 + "}")
    assert "Parameters" not in write_report(folder).read_text()


def test_a_folder_name_reaches_the_terminal_as_letters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "a\x1b[31mred")
    assert main([str(folder)]) == 0
    assert "a\\x1b[31mred" in capsys.readouterr().out


def test_a_timeline_without_actions(tmp_path: Path) -> None:
    assert "No actions of a step" in outline(make_run(tmp_path, actions=[])).text


def test_time_that_no_part_explains_is_shown_as_other(tmp_path: Path) -> None:
    with_rest = outline(make_run(tmp_path / "a", lines=[step_line(1, step_ms=250.0)]))
    assert "other 50.0 ms · 20 %" in with_rest.text
    assert "other" not in outline(make_run(tmp_path / "b", lines=[step_line(1)])).text


def test_the_command_prints_the_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, actions=ACTIONS)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert not list(tmp_path.glob(".report*"))


def test_a_wrong_folder_is_answered_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent does not exist. Give the folder of a run"):
        main([str(tmp_path / "absent")])
    with pytest.raises(UsageError, match=r"holds neither config.json nor metrics.jsonl"):
        main([str(tmp_path)])
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a folder"):
        main([str(tmp_path / "file")])
    with pytest.raises(UsageError, match=r"unknown flag --output"):
        main(["--output", str(tmp_path)])
    with pytest.raises(UsageError, match="RUN_DIR"):
        main([])


def test_a_page_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "report.html").mkdir()
    with pytest.raises(UsageError, match=r"cannot write .*report.html"):
        write_report(run)
    assert not list(run.glob(".report*"))
