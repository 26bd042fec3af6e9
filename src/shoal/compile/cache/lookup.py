"""Look a compilation up in the cache, or trace it and store the result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch.fx import GraphModule

from shoal.compile import environment
from shoal.compile.aot.compiler import AotCompiler
from shoal.compile.aot.lowered import Lowered
from shoal.compile.cache.entry import entry_from_json, entry_to_json
from shoal.compile.cache.errors import DamagedError, NotExactError
from shoal.compile.cache.key import key_of
from shoal.compile.cache.store import Store
from shoal.compile.observe.logs import Topic
from shoal.compile.observe.observation import say, stage, tell
from shoal.compile.observe.record import CacheUse
from shoal.compile.options import BackendOptions


def lower_cached(
    compiler: AotCompiler,
    options: BackendOptions,
    module: GraphModule,
    function: Callable[..., Any],
    args: Sequence[Any],
    fixed: Collection[int],
) -> Lowered:
    """What `compiler.lower` gives for `function`, which is that of Dynamo's graph `module`."""
    store = Store(folder=environment.cache_folder())
    try:
        with stage("key"):
            key = key_of(module, args, fixed, options)
    except NotExactError as error:
        _tell(CacheUse.REFUSED, str(error))
        return compiler.lower(function, args, fixed)
    with stage("read"):
        found = _read(store, key, compiler, options, args)
    if found is not None:
        _tell(CacheUse.HIT, f"found {key[:16]} in {store.folder}")
        return found
    lowered = compiler.lower(function, args, fixed)
    with stage("write"):
        _write(store, key, lowered)
    return lowered


def _read(
    store: Store, key: str, compiler: AotCompiler, options: BackendOptions, args: Sequence[Any]
) -> Lowered | None:
    try:
        content = store.read(key)
        if content is None:
            return None
        mode = compiler.mode_for(args)
        # Without them it is read faster; passes over collectives get them where there are any.
        with_values = options.inner == "inductor" or options.passes is not None
        return entry_from_json(content, args, mode, with_values=with_values)
    except DamagedError as error:
        # Wrong or not: it is traced again, and written anew.
        why = str(error)
        say(Topic.CACHE, lambda: f"{key[:16]} is there but cannot be used: {why}")
        store.remove(key)
        return None


def _write(store: Store, key: str, lowered: Lowered) -> None:
    try:
        store.write(key, entry_to_json(lowered))
    except NotExactError as error:
        _tell(CacheUse.REFUSED, str(error))
    except OSError as error:
        # A full or read-only disk: the program runs all the same.
        _tell(CacheUse.REFUSED, f"{store.folder} cannot be written to: {error}")
    else:
        _tell(CacheUse.STORED, f"stored {key[:16]} in {store.folder}")


def _tell(use: CacheUse, note: str) -> None:
    """Keep what the cache did; of a refusal, with the reason, which is the note."""
    is_refused = use is CacheUse.REFUSED
    tell(cache=use, cache_note=note if is_refused else "")
    say(Topic.CACHE, lambda: f"not cached: {note}" if is_refused else note)
