"""Ids are unique, in forked children too."""

import os

from agentgym.ids import new_id


def test_ids_differ_and_have_one_length() -> None:
    ids = [new_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert {len(id) for id in ids} == {16}


def test_a_forked_child_makes_ids_of_its_own() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, new_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 16).decode()[:10] != new_id()[:10]
    os.close(reader)
    os.close(writer)
