"""Simulated nodes have other environment variables."""

import os

import pytest

from conformance.ranks.node_variables import node_variables, set_node_variables


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sizes", [(2, 3), (1, 2, 4), (2, 2, 2, 2)])
def test_neighbours_differ_and_ranks_of_a_node_do_not(sizes: tuple[int, ...], seed: int) -> None:
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    made = [node_variables(sizes, rank, str(seed)) for rank in range(sum(sizes))]
    alike = {"SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_TASKS_PER_NODE"}
    alike |= {"SLURM_JOB_ID", "SLURM_CPUS_ON_NODE"}
    for one, other, node, other_node in zip(made, made[1:], nodes, nodes[1:], strict=False):
        differing = {name for name in one if one[name] != other[name]}
        assert differing == (one.keys() - alike if node != other_node else set())


def test_one_node_has_the_variables_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in node_variables((1, 1), 0, "seed"):
        monkeypatch.setenv(name, "the user's")
    set_node_variables((2,), 0, "seed")
    assert os.environ["SLURM_NODEID"] == "the user's"
    set_node_variables((1, 1), 1, "seed")
    assert os.environ["SLURM_NODEID"] == "1"
    for name, value in node_variables((1, 1), 1, "seed").items():
        assert os.environ.get(name) == value
