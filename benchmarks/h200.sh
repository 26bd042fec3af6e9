#!/usr/bin/env bash
# All results of one large GPU, from the source folder: bash benchmarks/h200.sh PART FOLDER
# Each part takes under nine minutes and ends with 1 if a run failed, such as one whose loss was no
# number. A part that is cut keeps the cases that were done. Afterwards copy the files to
# benchmarks/results, and let `python benchmarks/tables.py` write README.md and docs/bench.md.
#
#   part             cases                      what stands on it
#   eager            B1-8 B2 B4 B1-64 B1-1024   the ratios, milliseconds, memory and floors
#   eager-large      B5 B3, and AdamW           the same, and the optimizer's step
#   compiled         B4 B1-8 B2, CUDA graphs    the compiled tables
#   compiled-large   B3 B5                      the same
#   compiled-ranks   B1-64 B1-1024              the same
#   scripts          B2 B5, tiny models         how far ahead to gather; the host's cost by size
#
# Files that compare two versions of shoal (20261118-beside-…, -sections-, -few-columns-) belong to
# those two, and are not made again: benchmarks/beside.py compares others.
set -u
part=$1 folder=$2
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1
mkdir -p "$folder"
failed=0
day=$(date -u +%Y%m%d)

bench() { # NAME FLAGS...
    local name=$1
    shift
    echo "== $name: shoal bench $*"
    python3 -m shoal bench "$@" --out "$folder/$day-h200-$name.json" || failed=1
}

script() { # NAME FILE FLAGS...
    local name=$1 file=$2
    shift 2
    echo "== $name: $file $*"
    python3 "benchmarks/$file" "$@" --out "$folder/$day-$name-h200.json" || failed=1
}

eager=plain,ddp,fsdp1,fsdp2,shoal,shoal-flat,shoal-wrapper
graphs=plain,plain-shoal,simple-fsdp,shoal-graph

case $part in
eager)
    bench eager --modes eager --engines $eager --repeats 4 --cases B1-8,B2,B4,B1-64,B1-1024
    ;;
eager-large)
    bench eager-large --modes eager --engines $eager --repeats 3 --cases B5,B3
    script adamw adamw.py
    ;;
compiled)
    bench cudagraphs --modes cudagraphs --engines $graphs --repeats 4 --timeout 240 --cases B4
    bench compiled --modes compiled --engines $graphs --repeats 4 --timeout 240 --cases B4,B1-8,B2
    ;;
compiled-large)
    bench compiled-large --modes compiled --engines $graphs --repeats 3 --timeout 240 --cases B3,B5
    ;;
compiled-ranks)
    bench compiled-64 --modes compiled --engines $graphs --repeats 3 --timeout 240 --cases B1-64
    # simple-fsdp would cut each uneven parameter into 1024 pieces in the graph.
    bench compiled-1024 --modes compiled --engines ${graphs/simple-fsdp,/} --repeats 3 \
        --timeout 240 --cases B1-1024
    ;;
scripts)
    script prefetch-depth prefetch_depth.py --cases B2,B5 --rounds 5
    script scaling scaling.py --rounds 2
    ;;
*)
    echo "unknown part $part: see benchmarks/h200.sh" >&2
    exit 2
    ;;
esac
exit $failed
