from pathlib import Path

import pytest

from shoal.bench.cases import Mode
from shoal.bench.results import Status, read_results
from shoal.cli.bench import main


@pytest.mark.parametrize("case", ["B1-1024", "B6b"])
def test_quick_from_the_command_line_to_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    out = tmp_path / "results.json"
    argv = ["--quick", "--cases", case, "--engines", "plain,fsdp2,shoal", "--out", str(out)]
    assert main(argv) == 0
    assert "not a measurement" in capsys.readouterr().out

    results = read_results(out)
    assert results.quick
    assert results.sources[0].command.startswith("shoal bench --quick --cases")
    assert [record.engine for record in results.records] == ["plain", "fsdp2", "shoal"]
    for record in results.records:
        assert record.status is Status.OK, record.reason
        assert record.mode is Mode.EAGER
        assert record.figures is not None
        # 2 rounds of 3 steps, as the quick pace has it
        assert [len(one.wall_ms) for one in record.compute_rounds] == [3, 3]
        fastest = min(ms for one in record.compute_rounds for ms in one.wall_ms)
        assert record.figures.forward_backward_ms == fastest
        assert record.figures.optimizer_ms > 0
        if record.engine == "plain":
            assert record.figures.collectives is None
        else:
            # 4 blocks and a root: gathered in forward, the blocks again in backward, all reduced
            assert record.figures.collectives is not None
            assert record.figures.collectives.num_calls == 5 + 4 + 5
