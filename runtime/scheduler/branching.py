"""The sequences of a beam search in the scheduler: they run, wait, and end together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from enginewright.runtime.kv_cache.cache_manager import CacheManager
from enginewright.runtime.requests.request import BeamSearch, Generation, Request


def together(request: Request) -> Sequence[Request]:
    """Returns the request alone, or all sequences of its beam search."""
    return [request] if request.search is None else request.search.members


def sequences_to_come(running: Sequence[Request]) -> int:
    """Returns the number of sequences by which the running beam searches may still grow.

    These are the sequences that wait, and those that branch off later.
    """
    searches = [request.search for request in running if request.search is not None]
    if not searches:
        return 0
    return sum(search.params.num_beams - sequences for search, sequences in Counter(searches).items())


def places_taken(running: Sequence[Request]) -> int:
    """Returns the number of running requests plus ``sequences_to_come``."""
    return len(running) + sequences_to_come(running)


def branch(search: BeamSearch, cache: CacheManager, running: list[Request]) -> bool:
    """Continues the sequences of a beam search with its chosen tokens, or ends the search.

    Sequences for which a grammar allows no next token are removed from ``running`` and ``search.members``, except for
    the root.

    Args:
        search: the search, whose sequences are all running.
        cache: the blocks of the sequences.
        running: the running requests.

    Returns:
        False if a sequence got no blocks, so that all of them have to be computed again.
    """
    branches = search.choose()
    if search.finished:
        root = search.root
        for member in search.members:
            running.remove(member)
            cache.release(member)
        root.accept_answers()
        return True
    first = running[0].search is search
    going: dict[Generation, list[int]] = {}
    for i, one in enumerate(branches):
        going.setdefault(one.parent, []).append(i)
    spare = [member for member in search.members if member not in going]
    for member in spare:
        cache.release(member, partly=False)
    complete = True
    if search.root in spare and not any(len(indices) > 1 for indices in going.values()):
        parent = next(iter(going))  # the caller waits for the root, so the root becomes this sequence
        search.root.become(parent)
        complete = cache.fork(parent, search.root, force=first)
        going = {search.root if one is parent else one: indices for one, indices in going.items()}
        cache.release(parent, partly=False)
        spare = [*spare[1:], parent]
    last = running.index(search.members[-1])
    for parent, indices in going.items():
        for i in indices[1:]:  # before the parent gets its next token: they begin with its tokens
            if spare:
                child = spare.pop(0)
                child.become(parent)
            else:
                child = parent.branch()
                search.members.append(child)
                last += 1
                running.insert(last, child)
            complete = cache.fork(parent, child, force=first) and complete
            search.advanced(child, branches[i])
        search.advanced(parent, branches[indices[0]])
    for member in spare:
        search.members.remove(member)
        running.remove(member)
    return complete
