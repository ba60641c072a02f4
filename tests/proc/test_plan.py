"""`planaria plan`, and what `serve` says of the same placement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planaria.cli import main
from planaria.cli.plan import Planned
from planaria.config.cluster_file import cluster_from
from planaria.config.options import ParallelConfig
from planaria.errors import ConfigError
from planaria.node import node_name
from planaria.server.placed import Check
from planaria.topology import Cluster, Device, Layout, Node, pack
from planaria.topology.table import CameUp, lines, rows
from planaria.wire import Placed
from tests.api.fake_engine import facts
from tests.proc.servers import Server, needs_smollm2, planaria


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster that happens to run on this machine is looked at."""
    monkeypatch.setenv("PLANARIA_RAY_ADDRESS", "local")


def nodes(*sizes: int, **more: Any) -> dict[str, Any]:
    return {
        "nodes": [
            {"id": f"node{i}", "address": f"10.0.0.{i}", "devices": [{"index": d, **more} for d in range(size)]}
            for i, size in enumerate(sizes)
        ]
    }


def file_of(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "cluster.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def plan(*args: str) -> Ran:
    """`planaria plan ARGS`."""
    ran = planaria("plan", *args)
    return Ran(ran.returncode, ran.stdout, ran.stderr)


@pytest.fixture
def plan_here(capsys: pytest.CaptureFixture[str]) -> Any:
    """The same in this process, where things may be other than they are."""

    def run(*args: str) -> Ran:
        code = main(["plan", *args])
        return Ran(code, *capsys.readouterr())

    return run


STRICT = ("-tp", "8", "-dp", "4", "--ray-dp-pack-strategy", "strict", "--cluster")


def test_the_table(tmp_path: Path) -> None:
    path = file_of(tmp_path, nodes(8, 8, 8, 8, 8, kind="H100", memory="80GiB"))
    ran = plan(*STRICT, path)
    assert (ran.code, ran.err) == (0, "")
    first, *table = ran.out.splitlines()
    assert first == f"{path}: tp=8 dp=4: 32 ranks on 4 nodes, strict, 1 engine on each"
    assert table[0].split() == ["RANK", "DP", "PP", "TP", "NODE", "ADDRESS", "DEVICE", "KIND"]
    assert [line.split() for line in table[1:]] == [
        [str(8 * n + i), str(n), "0", str(i), f"node{n}", f"10.0.0.{n}", str(i), "H100"]
        for n in range(4)
        for i in range(8)
    ]
    told = plan(*STRICT, path, "--json")
    assert told.code == 0 and told.json["feasible"] and told.json["layout"] == {"dp": 4, "pp": 1, "tp": 8}
    assert (told.json["strategy"], told.json["data_parallel_size_local"], told.json["head"]) == ("strict", 1, "node0")
    assert told.json["ranks"][9] == {
        "rank": 9, "dp": 1, "pp": 0, "tp": 1, "node": "node1", "address": "10.0.0.1", "device": 1, "kind": "H100",
        "memory": 80 << 30,
    }  # fmt: skip
    assert told.json["engines"][3] == {
        "dp": 3, "local_rank": 0, "bundles": [{"node": "node3", "devices": 1}] * 8 + [{"node": "node3", "devices": 0}],
    }  # fmt: skip


def test_what_does_not_fit(tmp_path: Path) -> None:
    path = file_of(tmp_path, nodes(8, 8, 4, 8))
    ran = plan(*STRICT, path)
    assert ran.code == 2 and len(ran.err.splitlines()) == 1
    assert ran.err.startswith("planaria: tp=8 dp=4 needs 4 engines of 8 devices (strict, 1 on each node), 3 fit; ")
    assert "28 devices (node0 8, node1 8, node2 4, node3 8); tp=8 dp=3 would fit" in ran.err
    first, header, *table, skipped = ran.out.splitlines()
    assert first == "would fit: -tp 8 -dp 3 --ray-dp-pack-strategy strict --data-parallel-size-local 1"
    assert header.startswith("RANK") and len(table) == 24
    assert skipped == "node2 is skipped: room for 0 of 1 engines (4 devices, an engine takes 8)"
    told = plan(*STRICT, path, "--json")
    assert told.code == 2 and not told.json["feasible"] and (told.json["needed"], told.json["found"]) == (32, 28)
    assert told.json["reason"].startswith("tp=8 dp=4 needs 4 engines") and "would fit" not in told.json["reason"]
    assert told.json["nearest"] == {
        "layout": {"dp": 3, "pp": 1, "tp": 8}, "strategy": "strict", "options": first.removeprefix("would fit: "),
    }  # fmt: skip
    # the options that are said to fit do
    assert plan(*told.json["nearest"]["options"].split(), "--cluster", path).code == 0


@pytest.mark.parametrize(
    ("args", "reason", "fits"),
    [
        (("-tp", "8", "-dp", "2", "--data-parallel-size-local", "2"), "the head node0 is asked to hold 2 engines",
         "-tp 8 -dp 2 --ray-dp-pack-strategy strict --data-parallel-size-local 1"),
        (("-tp", "4", "-dp", "7"), "(strict, 1 on each node), 4 fit",
         "-tp 4 -dp 7 --ray-dp-pack-strategy fill --data-parallel-size-local 2"),
        (("-tp", "8", "-pp", "4"), "tp=8 pp=4 needs 32 devices, the cluster has 28", "-tp 8 -pp 3"),
        (("-tp", "16", "-dp", "1", "--ray-dp-pack-strategy", "span"), "needs nodes with equally many devices", None),
    ],
)  # fmt: skip
def test_reasons(tmp_path: Path, args: tuple[str, ...], reason: str, fits: str | None) -> None:
    ran = plan(*args, "--cluster", file_of(tmp_path, nodes(8, 8, 4, 8)))
    assert ran.code == 2 and reason in ran.err
    assert ran.out.splitlines()[:1] == ([] if fits is None else [f"would fit: {fits}"])


def test_one_engine_goes_where_serve_would_put_it(tmp_path: Path) -> None:
    """Over several nodes, where it must; a strategy forbids that."""
    path = file_of(tmp_path, nodes(4, 4))
    ran = plan("-tp", "8", "--cluster", path)
    assert ran.code == 0 and ran.out.splitlines()[-1].startswith("1 tensor group spans several nodes (the first: node0")
    assert plan("-tp", "8", "--ray-dp-pack-strategy", "strict", "--cluster", path).code == 2


def test_lanes_of_one_engine_go_where_its_ranks_do(tmp_path: Path) -> None:
    """No strategy is about them, and they need not be alike on every node."""
    path = file_of(tmp_path, nodes(4, 2))
    told = plan("-dp", "3", "-tp", "2", "--enable-expert-parallel", "--cluster", path, "--json")
    assert told.code == 0 and told.json["strategy"] is None and told.json["layout"] == {"dp": 3, "pp": 1, "tp": 2}
    assert [(row["dp"], row["node"]) for row in told.json["ranks"][::2]] == [(0, "node0"), (1, "node0"), (2, "node1")]


def test_lanes_that_ray_has_a_group_for_each_of_are_packed_as_engines(tmp_path: Path) -> None:
    """In each group a device for each rank, and a core in which the engine may sit."""
    path = file_of(tmp_path, nodes(4, 4))
    args = ["-dp", "2", "-tp", "2", "--enable-expert-parallel", "--data-parallel-backend", "ray", "--cluster", path]
    told = plan(*args, "--data-parallel-size-local", "1", "--json")
    assert told.code == 0 and told.json["strategy"] == "strict" and told.json["layout"] == {"dp": 2, "pp": 1, "tp": 2}
    assert [(row["dp"], row["node"]) for row in told.json["ranks"]] == [(lane, f"node{lane}") for lane in (0, 0, 1, 1)]
    assert [[bundle["devices"] for bundle in lane["bundles"]] for lane in told.json["engines"]] == [[1, 1, 0]] * 2
    refused = plan(*args, "--data-parallel-size-local", "2", "-tp", "4")
    assert refused.code == 2 and "would fit" in refused.out


def test_options_are_checked_as_for_serve(tmp_path: Path) -> None:
    path = file_of(tmp_path, nodes(8))
    for args, rule in (
        (("--ray-dp-pack-strategy", "loose"), "loose: is unknown; choose one of strict, fill, span"),
        (("-dp", "0"), "--data-parallel-size 0: must be at least 1"),
        (("-dp", "2", "--data-parallel-rank", "1"), "Ray places them anywhere"),
        (("--distributed-executor-backend", "mp"), "is placed on by Ray, and the executor is mp"),
    ):
        ran = plan(*args, "--cluster", path)
        assert (ran.code, ran.out) == (2, "") and rule in ran.err


BAD = [
    ("no such file", None, "can't be read: No such file or directory"),
    ("not JSON", "nodes: []", "is not JSON"),
    ("no nodes", {}, "missing required field `nodes`"),
    ("no id", {"nodes": [{"devices": []}]}, "missing required field `id` - at `nodes[0]`"),
    ("empty id", {"nodes": [{"id": "", "devices": []}]}, "at `nodes[0].id`"),
    ("no devices", {"nodes": [{"id": "a"}]}, "missing required field `devices` - at `nodes[0]`"),
    ("no index", {"nodes": [{"id": "a", "devices": [{}]}]}, "required field `index` - at `nodes[0].devices[0]`"),
    ("index", {"nodes": [{"id": "a", "devices": [{"index": -1}]}]}, "at `nodes[0].devices[0].index`"),
    ("index is text", {"nodes": [{"id": "a", "devices": [{"index": "0"}]}]}, "at `nodes[0].devices[0].index`"),
    ("memory", {"nodes": [{"id": "a", "devices": [{"index": 0, "memory": "80 apples"}]}]},
     "`nodes[0].devices[0].memory` '80 apples' is not a size"),
    ("misspelt", {"nodes": [{"id": "a", "devices": [], "Head": True}]}, "unknown field `Head` - at `nodes[0]`"),
    ("head", {"nodes": [{"id": "a", "devices": [], "head": "yes"}]}, "at `nodes[0].head`"),
    ("two heads", {"nodes": [{"id": id, "devices": [], "head": True} for id in "ab"]}, "`head` is true in a and b"),
    ("a node twice", {"nodes": [{"id": "a", "devices": []}] * 2},
     "`nodes[1].id` is 'a', which `nodes[0].id` is too"),
    ("a device twice", {"nodes": [{"id": "a", "devices": [{"index": 0}, {"index": 0}]}]},
     "`nodes[0].devices[1].index` is 0, which `nodes[0].devices[0].index` is too"),
    ("no address", {"nodes": [{"id": "a", "devices": [{"index": 0}]}]}, "node a: has no address"),
    ("several addresses", {"nodes": [{"id": "a", "address": ["x", "y"], "devices": [{"index": 0}]}]},
     "node a: has several addresses (x, y)"),
    ("no devices at all", nodes(0, 0), "needs 1 device, and no node has any"),
]  # fmt: skip


@pytest.mark.parametrize("case", BAD, ids=[case[0] for case in BAD])
def test_bad_files(tmp_path: Path, case: tuple[str, Any, str]) -> None:
    _, content, says = case
    path = str(tmp_path / "none.json") if content is None else file_of(tmp_path, content)
    ran = plan("--ray-dp-pack-strategy", "strict", "--cluster", path)
    assert ran.code == 2 and says in ran.err and len(ran.err.splitlines()) == 1 and ran.out == ""


def test_the_head_of_a_file() -> None:
    """The marked one, else the smallest id in natural order."""
    content = {"nodes": [{"id": id, "devices": [{"index": 3, "kind": "K", "memory": 5}]} for id in ("n10", "n9", "n2")]}
    assert cluster_from(json.dumps(content).encode(), "f") == Cluster(
        tuple(Node(id, (Device(3, "K", 5),)) for id in ("n10", "n9", "n2")), "n2"
    )
    content["nodes"][0]["head"] = True
    assert cluster_from(json.dumps(content).encode(), "f").head == "n10"
    with pytest.raises(ConfigError, match="is not JSON"):
        cluster_from(b"\xff", "f")


def test_this_machine() -> None:
    ran = plan("-tp", "2", "-dp", "2")
    assert ran.code == 0 and ran.out.startswith("this machine: tp=2 dp=2: 4 ranks on 1 node\n")
    assert [line.split()[:6] for line in ran.out.splitlines()[2:6]] == [
        [str(rank), str(rank // 2), "0", str(rank % 2), node_name(), "127.0.0.1"] for rank in range(4)
    ]
    other = plan("-tp", "2", "-dp", "3", "--data-parallel-start-rank", "1", "--data-parallel-size-local", "2", "--json")
    assert [(row["rank"], row["dp"]) for row in other.json["ranks"]] == [(2, 1), (3, 1), (4, 2), (5, 2)]
    several = plan("-tp", "2", "-pp", "2", "--nnodes", "2", "--node-rank", "1")
    assert several.code == 0 and several.out.startswith("2 nodes: tp=2 pp=2: 4 ranks on 2 nodes\n")


@needs_smollm2
def test_a_models_rules() -> None:
    ran = plan("smollm2", "-tp", "12")
    assert ran.code == 2 and "has only 9 query heads; use at most 9" in ran.err
    assert plan("smollm2", "-pp", "2", "--pp-layer-partition", "10,20").code == 0


@pytest.mark.parametrize(("args", "rule"), [
    (("--block-size", "17"), "must be a multiple of 16 up to 256"),
    (("--max-model-len", "100000"), "the model's positions end at 8192"),
    (("--kv-cache-memory", "179MiB"), "a request of --max-model-len 8192 needs 180 MiB of a rank"),
    (("--max-num-batched-tokens", "3"), "must be at least --max-num-seqs"),
    (("--speculative-config", '{"modl": "smollm2"}'), "unknown field `modl`"),
    (("-tp", "3", "--speculative-config", '{"model": "smollm2", "draft_tensor_parallel_size": 2}'), "must be 1, or"),
    (("--kv-transfer-config", '{"kv_connector": "tpc"}'), "kv_connector tpc: is unknown"),
])  # fmt: skip
def test_what_serve_refuses_is_refused(args: tuple[str, ...], rule: str) -> None:
    ran = plan("smollm2", *args)
    assert (ran.code, ran.out) == (2, "") and rule in ran.err


def test_a_model_that_drafts_is_counted_where_it_is() -> None:
    """Whole on one rank, or dealt to the tensor ranks of the last stage; KV that was asked for is for both."""

    def needs(*args: str) -> dict[tuple[int, int], dict[str, int]]:
        ran = plan("smollm2", "-tp", "3", "-pp", "2", "--json", *args)
        return {(rank["pp"], rank["tp"]): rank["needs"] for rank in ran.json["ranks"]}

    alone, (whole,) = needs(), [rank["needs"] for rank in plan("smollm2", "--json").json["ranks"]]
    shares = [rank["needs"] for rank in plan("smollm2", "-tp", "3", "--json").json["ranks"]]
    one = needs("--speculative-config", '{"model": "smollm2"}')
    for at, found in one.items():
        assert found == {part: alone[at][part] + (whole[part] if at == (1, 0) else 0) for part in found}, at
    dealt = needs("--speculative-config", '{"model": "smollm2", "draft_tensor_parallel_size": 3}')
    for (pp, tp), found in dealt.items():
        assert found == {part: alone[pp, tp][part] + (shares[tp][part] if pp else 0) for part in found}
    given = needs("--kv-cache-memory", "1GiB", "--speculative-config", '{"model": "smollm2"}')
    assert {each["kv"] for each in given.values()} == {1 << 30}
    assert plan("smollm2", "--kv-cache-memory", "180MiB").code == 0
    assert plan("smollm2", "--kv-cache-memory", "9MiB", "--max-model-len", "auto").code == 0
    assert "smollm2, which drafts, is counted" in plan("smollm2", "--speculative-config", '{"model": "smollm2"}').out


def test_what_is_not_counted_is_said_by_name() -> None:
    ran = plan("smollm2", "--kv-transfer-config", '{"kv_connector": "tcp", "kv_role": "kv_producer"}')
    assert ran.code == 0 and "not counted: up to 954 MiB of each rank" in ran.out
    head = plan(
        "smollm2", "--speculative-config", '{"method": "eagle", "model": "/a/head"}', "--kv-offloading-size", "2"
    )
    assert "not counted: /a/head, the head that drafts" in head.out and "not counted: 2 GiB" in head.out
    several = ("--enable-lora", "--max-loras", "8", "--max-lora-rank", "64", "--dtype", "bfloat16")
    each = 30 * ((576 + 192) * 2 + 576 * 4 + (1536 + 576) * 3)  # rows and columns of a layer's matrices
    assert f"not counted: up to {each * 64 * 8 * 2 >> 20} MiB of a rank with adapters" in plan("smollm2", *several).out
    assert plan("smollm2", "--max-loras", "8").code == 2  # as `serve` says


@pytest.fixture
def experts(tmp_path: Path) -> str:
    """A model of eight experts, as far as `plan` reads it."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64,
        "intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 256,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return str(tmp_path)


def test_a_models_experts(experts: str) -> None:
    """Refused and warned of as by `serve`."""
    for args, rule in (
        (("-tp", "4", "-dp", "4", "--enable-expert-parallel"), "8 experts can't be on 16 ranks"),
        (("-tp", "2", "--enable-eplb"), "--enable-eplb True: moves whole experts"),
        (("-tp", "2", "--enable-dbo"), "--enable-dbo True: there is no exchange of tokens to hide"),
    ):
        ran = plan(experts, *args)
        assert (ran.code, ran.out) == (2, "") and rule in ran.err
    ran = plan(experts, "-tp", "4", "-dp", "2", "--enable-expert-parallel")
    assert ran.code == 0 and ran.out.startswith("this machine: tp=4 dp=2: 8 ranks on 1 node\n")
    redundant = ("--enable-eplb", "--eplb-config", '{"num_redundant_experts": 8}')
    ran = plan(experts, "-tp", "4", "-dp", "4", "--enable-expert-parallel", *redundant)
    assert ran.code == 0, ran.err
    warned = plan(experts, "-tp", "2", "--expert-placement-strategy", "round_robin")
    assert warned.code == 0 and "round_robin changes nothing without --enable-expert-parallel" in warned.out


def test_as_a_command() -> None:
    """With what its own process imports."""
    ran = planaria("plan", "-tp", "2", "--json", env={"PLANARIA_RAY_ADDRESS": "local"})
    assert ran.returncode == 0 and [row["tp"] for row in json.loads(ran.stdout)["ranks"]] == [0, 1]


@needs_smollm2
def test_serve_prints_the_same_table() -> None:
    args = ("-tp", "2", "-dp", "2")
    table = plan(*args).out.splitlines()[:6]
    with Server("smollm2", "--null-worker", *args) as server:
        pass
    log = [line.rstrip() for line in server.log]
    first = log.index(table[0])
    assert log[first : first + 6] == table
    assert not [line for line in log if "was planned" in line]


def test_serve_compares_it_with_where_ranks_came_up() -> None:
    here = node_name()
    planned = Planned(ParallelConfig(tensor_parallel_size=2, data_parallel_size=2), "cpu")
    assert planned.differences(0, [CameUp(here, (5,))] * 2) == [], "a CPU's slots have no numbers"
    assert planned.differences(1, [CameUp("other"), CameUp(here)]) == [f"rank 2 was planned on {here} and is on other"]
    assert planned.differences(4, [CameUp(here), CameUp("other")]) == [f"rank 9 was planned on {here} and is on other"]
    assert planned.differences(0, [CameUp("other")]) == [], "another layout by now"
    lanes = Planned(ParallelConfig(lanes=2, tensor_parallel_size=2), "cpu")
    assert "tp=2 dp=2: 4 ranks on 1 node" in lanes.text
    assert lanes.differences(0, [CameUp(here)] * 3 + [CameUp("b")]) == [f"rank 3 was planned on {here} and is on b"]
    over = Planned(ParallelConfig(tensor_parallel_size=4, nnodes=2, distributed_executor_backend="mp"), "cpu")
    assert over.differences(0, [CameUp(node) for node in "aabb"]) == []
    assert over.differences(0, [CameUp(node) for node in "abbb"]) == ["rank 1 was planned on a and is on b"]


def test_an_engines_own_plan_is_compared_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """As one with its ranks on Ray says it: then they come up, and one of them moves."""
    check, tables = Check(), list[str]()
    check.on_table = tables.append
    check.placed(1, Placed("Ray", Layout(tp=2), [("n0", "x", 3, 0), ("n0", "x", 4, 1)]))
    assert tables == ["\n".join([
        "Ray: tp=2: 2 ranks on 1 node", "RANK  DP  PP  TP  NODE  ADDRESS  DEVICE",
        "   2   1   0   0  n0    x             3", "   3   1   0   1  n0    x             4",
    ])]  # fmt: skip
    came_up = facts(places=[CameUp("n0", (), 0), CameUp("n0", (), 1)])
    check.look(1, came_up)
    assert check.found == {1: []} and not caplog.records
    moved = facts(places=[CameUp("n0", (), 1), CameUp("n1")])
    for _ in range(2):
        check.look(1, moved)
    lines = [
        "rank 2 was planned in bundle 0 (device 3 of n0) and is in bundle 1", "rank 3 was planned on n0 and is on n1"
    ]  # fmt: skip
    assert check.found == {1: lines} and [record.message for record in caplog.records] == lines
    check.forget(1)
    assert check.found == {}


def test_rows_of_a_fleet_whose_others_are_elsewhere() -> None:
    cluster = Cluster((Node.of("n", 4, "x"),), "n")
    table = rows(pack(cluster, Layout(dp=2, tp=2)), cluster, 3)
    assert [(row.rank, row.dp) for row in table] == [(6, 3), (7, 3), (8, 4), (9, 4)] and len(lines(table)) == 5


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_weights_keys_and_values_and_activations_are_part_of_what_fits(tmp_path: Path) -> None:
    """From config.json alone: 8.03 billion weights in two bytes, 8,192 positions of 32 layers' 8 KV heads."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    small = plan(str(model), "--cluster", file_of(tmp_path, nodes(1, memory="10MiB")))
    assert small.code == 2 and not small.out
    assert "rank 0 needs 16," in small.err and "and device 0 of node0 has 10 MiB" in small.err
    assert "weights 15,317 MiB, KV 1,024 MiB, activations" in small.err and "give more ranks (-tp, -pp)" in small.err
    two = plan(str(model), "--cluster", file_of(tmp_path, nodes(2, memory="10GiB")))
    assert two.code == 2 and two.out.startswith("would fit: -tp 2\n") and "memory: a rank needs up to" in two.out
    assert plan(str(model), "-tp", "2", "--cluster", file_of(tmp_path, nodes(2, memory="10GiB"))).code == 0
    one = file_of(tmp_path, nodes(1, memory="10GiB"))
    told = plan(str(model), "--quantization", "q8_0", "--json", "--cluster", one)
    (rank,) = told.json["ranks"]
    assert rank["needs"]["weights"] == int(8030261248 * 34 / 32) and rank["needs"]["kv"] == 1 << 30
    assert told.json["warnings"] == []
    longer = plan(str(model), "-tp", "2", "--kv-cache-memory", "4GiB", "--cluster",
                  file_of(tmp_path, nodes(2, memory="10GiB")), "--json")  # fmt: skip
    assert longer.code == 2 and "KV 4,096 MiB" in longer.json["reason"] and longer.json["needed"] is None
    unknown = plan(str(model), "--cluster", file_of(tmp_path, nodes(1)))
    assert unknown.code == 0 and unknown.out.splitlines()[-1].endswith("; what the devices have isn't known")


def test_a_node_without_accelerators_has_its_memory_for_all_ranks(
    plan_here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr("planaria.node.available_memory", lambda: 20 << 30)
    assert plan_here(str(tmp_path), "--device", "cpu", "-dp", "1").code == 0
    two = plan_here(str(tmp_path), "--device", "cpu", "-dp", "2")
    assert two.code == 0 and "2 engines share weights" in two.out
    assert plan_here(str(tmp_path), "--device", "cpu", "-dp", "2", "--kernels", "torch").code == 0
    refused = plan_here(
        str(tmp_path), "--device", "cpu", "-dp", "2", "--model-impl", "transformers"
    )  # each has its own
    assert refused.code == 2 and "has 10,240 MiB" in refused.err
