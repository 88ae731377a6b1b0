"""The oracle against the released code's golden tensors, and its two KDA forms against each other."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_kimi_k3 import reference as ref
from vllm_kimi_k3.reference import K3Config, KdaState, KimiK3

LENGTHS = (1, 5, 16, 17, 63, 64, 65, 130)


@pytest.fixture(scope="module")
def goldens(shared: Path) -> Path:
    return shared / "data" / "goldens"


@pytest.fixture(scope="module")
def config(goldens: Path) -> K3Config:
    return K3Config.from_dict(json.loads((goldens / "text_tiny.config.json").read_text()))


@pytest.fixture(scope="module")
def weights(goldens: Path) -> dict[str, Tensor]:
    return load_file(goldens / "text_tiny.weights.safetensors")


@pytest.fixture(scope="module")
def modules(goldens: Path) -> dict[str, Tensor]:
    return load_file(goldens / "modules.safetensors")


@pytest.fixture(scope="module")
def io(goldens: Path) -> dict[str, Tensor]:
    return load_file(goldens / "text_tiny.io.safetensors")


@pytest.fixture(scope="module")
def model(config: K3Config, weights: dict[str, Tensor]) -> KimiK3:
    return KimiK3(config, weights, torch.float32)


def assert_close(got: Tensor, want: Tensor, relative: float = 2e-6) -> None:
    """Largest error against the largest magnitude, the measure of the goldens' README."""
    assert got.shape == want.shape and got.dtype == want.dtype
    error, size = (got.double() - want.double()).abs().max(), want.double().abs().max()
    assert error <= relative * size, f"off by {error:.3g} where the largest value is {size:.3g}"


# The whole model.


@pytest.mark.parametrize("chunk", [None, 16, 64], ids=["recurrent", "chunk16", "chunk64"])
@pytest.mark.parametrize("length", LENGTHS)
def test_logits(config, weights, io, length, chunk):
    model = KimiK3(config, weights, torch.float32, chunk=chunk)
    logits = model.forward(io[f"len{length}.input_ids"])
    assert (logits - io[f"len{length}.logits"]).abs().max() <= 1e-4


def test_logits_fp64(config, weights, io):
    logits = KimiK3(config, weights, torch.float64).forward(io["len130.input_ids"])
    assert logits.dtype == torch.float64
    assert (logits - io["len130.logits"]).abs().max() <= 1e-4


@pytest.mark.parametrize("length", [65, 130])
def test_logits_bf16(config, weights, io, length):
    logits = KimiK3(config, weights, torch.bfloat16).forward(io[f"len{length}.input_ids"])
    assert logits.dtype == torch.bfloat16
    for want, mean in ((io[f"len{length}.logits"], 0.995), (io[f"len{length}.logits_bf16"].float(), 0.999)):
        cosine = torch.cosine_similarity(logits.float(), want, dim=-1)
        assert cosine.min() >= 0.97 and cosine.mean() >= mean
        assert (logits.float() - want).square().mean().sqrt() <= 0.08 * want.std()


def test_trace(model, goldens):
    golden = load_file(goldens / "text_tiny.trace65.safetensors")
    trace: dict[str, Tensor] = {}
    hidden, aux = model.run(model.embed(golden["input_ids"]), aux_layers=(5, 0, 6), trace=trace)
    assert len(trace) == 7 * 5
    for name, value in trace.items():
        assert_close(value, golden[name], 3e-5)
    assert_close(hidden, golden["final.mixer_out"], 3e-5)
    for layer, stream in zip((5, 0, 6), aux, strict=True):
        assert stream is trace[f"layer{layer}.prefix_out"]
    for layer in range(1, 7):
        x = ref.rms_norm(
            golden[f"layer{layer}.mlp_mixer_out"],
            model.weight(f"model.layers.{layer}.post_attention_layernorm.weight"),
            model.config.rms_norm_eps,
        )
        ids, chosen = model.route(f"model.layers.{layer}.block_sparse_moe", x)
        chosen, order = chosen.sort(descending=True)
        assert torch.equal(ids.gather(-1, order).int(), golden[f"layer{layer}.topk_idx"])
        assert (chosen - golden[f"layer{layer}.topk_weight"]).abs().max() <= 1e-4


@pytest.mark.parametrize("chunk", [None, 16], ids=["recurrent", "chunk16"])
def test_decode_and_states(config, weights, goldens, chunk):
    golden = load_file(goldens / "text_tiny.decode.safetensors")
    model = KimiK3(config, weights, torch.float32, chunk=chunk)
    ids, state = golden["input_ids"], model.new_state()

    def assert_states(prefix: str) -> None:
        for i, layer in enumerate(state.layers):
            at = f"{prefix}.layer{i}"
            if isinstance(layer, KdaState):
                assert_close(layer.recurrent, golden[f"{at}.recurrent_state"], 3e-5)
                for part in "qkv":
                    assert_close(layer.conv[part], golden[f"{at}.conv_state_{part}"][:, 1:], 3e-5)
            else:
                assert layer.latent.shape[0] == golden[f"{at}.kv_len"].item() == state.length

    assert (model.forward(ids[:20], state) - golden["prefill_logits"]).abs().max() <= 1e-4
    assert_states("after20")
    steps = torch.cat([model.forward(ids[t : t + 1], state) for t in range(20, 30)])
    assert (steps - golden["decode_logits"]).abs().max() <= 1e-4
    assert (steps - golden["full_logits"][20:]).abs().max() <= 1e-4
    assert_states("after30")


def test_dequantised_experts_give_the_same_logits(config, weights, goldens, io):
    experts = load_file(goldens / "text_tiny.experts_dequant.safetensors")
    rest = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    got = KimiK3(config, rest | experts, torch.float32).forward(io["len17.input_ids"])
    want = KimiK3(config, weights, torch.float32).forward(io["len17.input_ids"])
    assert torch.equal(got, want)


# Its parts.


def test_kda_layer(config, weights, modules):
    model = KimiK3(config, weights, torch.float32)
    state = model.new_state().layers[1]
    assert isinstance(state, KdaState)
    for name, after in (("", "after65"), ("_next17", "after82"), ("_next1", "after83")):
        assert_close(model.attention(1, modules[f"kda.x{name}"], state), modules[f"kda.y{name}"])
        assert_close(state.recurrent, modules[f"kda.{after}.recurrent_state"])
        for part in "qkv":
            assert_close(state.conv[part], modules[f"kda.{after}.conv_state_{part}"][:, 1:])


def test_kda_layer_inside(model, modules):
    x, name, heads = modules["kda.x"], "model.layers.1.self_attn", (8, 16)

    def linear(part: str, value: Tensor) -> Tensor:
        return value @ model.weight(f"{name}.{part}.weight").T

    post = []
    for part in "qkv":
        weight = model.weight(f"{name}.{part}_conv1d.weight")
        post.append(ref.short_conv(linear(f"{part}_proj", x), weight, torch.zeros(128, 3))[0].unflatten(-1, heads))
    q, k = ref.normalise_qk(post[0], post[1])
    f = linear("f_b_proj", linear("f_a_proj", x)).unflatten(-1, heads)
    decay = ref.log_decay(f, model.weights[f"{name}.A_log"], model.weights[f"{name}.dt_bias"], -5.0)
    beta = linear("b_proj", x).sigmoid()
    o, _ = ref.kda_recurrent(q, k, post[2], decay, beta, torch.zeros(8, 16, 16))
    want = {"q_normed_scaled": q, "k_normed": k, "v": post[2], "log_decay": decay, "beta": beta, "o": o}
    for key, value in want.items():
        assert_close(value, modules[f"kda.{key}"])


@pytest.mark.parametrize("chunk", [None, 16, 64], ids=["recurrent", "chunk16", "chunk64"])
@pytest.mark.parametrize("initial", [False, True], ids=["fresh", "initial"])
def test_kda_core_head_dim_128(modules, chunk, initial):
    golden = {name.removeprefix("core128."): t for name, t in modules.items() if name.startswith("core128.")}
    decay = ref.log_decay(golden["g_raw"], golden["A_log"], golden["dt_bias"], -5.0)
    assert_close(decay, golden["log_decay"])
    q, k = ref.normalise_qk(golden["q"], golden["k"])
    start = golden["initial_state"] if initial else torch.zeros_like(golden["initial_state"])
    args = q, k, golden["v"].float(), decay, golden["beta_logit"].sigmoid(), start
    o, final = ref.kda_recurrent(*args) if chunk is None else ref.kda_chunked(*args, chunk)
    end = "_with_initial" if initial else ""
    assert_close(o, golden[f"o{end}"], 5e-6)
    assert_close(final, golden[f"final_state{end}"], 5e-6)


def test_mla(config, weights, modules):
    model = KimiK3(config, weights, torch.float32)
    state = model.new_state().layers[3]
    assert_close(model.attention(3, modules["mla.x"], state), modules["mla.y"])
    assert_close(state.latent, modules["mla.latent_row"])


def test_mla_norm_eps(model, modules):
    """At this scale an eps of 1e-5 in place of 1e-6 is off by 0.9."""
    got = model.attention(3, modules["mla.x_small"], model.new_state().layers[3])
    assert_close(got, modules["mla.y_small"])


def test_moe(model, modules):
    name, x = "model.layers.2.block_sparse_moe", modules["moe.x"]
    ids, chosen = model.route(name, x)
    summed = model.routed_experts(name, x, ids, chosen)
    chosen, order = chosen.sort(descending=True)
    assert torch.equal(ids.gather(-1, order).int(), modules["moe.topk_idx"])
    assert_close(chosen, modules["moe.topk_weight"])
    assert_close(summed, modules["moe.latent_sum"])
    normed = ref.rms_norm(summed, model.weight(f"{name}.routed_expert_norm.weight"), model.config.rms_norm_eps)
    assert_close(normed, modules["moe.latent_normed"])
    up = normed @ model.weight(f"{name}.routed_expert_up_proj.weight").T
    assert_close(model.feed_forward(2, x) - up, modules["moe.shared_out"])
    assert_close(model.feed_forward(2, x), modules["moe.y"])


def test_mlp(model, modules):
    assert_close(model.feed_forward(0, modules["mlp.x"]), modules["mlp.y"])


@pytest.mark.parametrize("snapshots", [0, 1, 3, 8])
def test_attn_res(modules, snapshots):
    prefix, blocks, norm, proj = (
        modules[f"attnres{snapshots}.{name}"] for name in ("prefix", "blocks", "norm_weight", "proj_weight")
    )
    got = ref.attn_res(prefix, list(blocks.unbind(1)), norm, proj, 1e-5)
    assert_close(got, modules[f"attnres{snapshots}.out"])
    low = [tensor.bfloat16() for tensor in (prefix, *blocks.unbind(1))]
    got = ref.attn_res(low[0], low[1:], norm, proj, 1e-5)
    assert_close(got, modules[f"attnres{snapshots}.out_bf16"], 2**-8)


def test_attn_res_without_snapshots_is_exact(modules):
    prefix, norm, proj = (modules[f"attnres0.{name}"] for name in ("prefix", "norm_weight", "proj_weight"))
    assert torch.equal(ref.attn_res(prefix, [], norm, proj, 1e-5), prefix)


def test_situ(modules):
    gate, up = modules["situ.gate"], modules["situ.up"]
    assert_close(ref.situ(gate, up, 4.0, 25.0), modules["situ.out"])
    assert_close(ref.situ(gate, up, 4.0, None), modules["situ.out_no_linear"])
    assert torch.equal(ref.situ(gate.bfloat16(), up.bfloat16(), 4.0, 25.0), modules["situ.out_bf16"])


def test_gated_norm(modules):
    x, gate, weight = (modules[f"gnorm.{name}"] for name in ("x", "gate", "weight"))
    assert_close(ref.gated_rms_norm(x, gate, weight, 1e-5), modules["gnorm.out"])
    got = ref.gated_rms_norm(x.bfloat16(), gate.bfloat16(), weight.bfloat16(), 1e-5)
    assert torch.equal(got, modules["gnorm.out_bf16"])


def test_norm(modules):
    x, weight = modules["norm.x"], modules["norm.weight"]
    assert_close(ref.rms_norm(x, weight, 1e-5), modules["norm.out"])
    assert torch.equal(ref.rms_norm(x.bfloat16(), weight.bfloat16(), 1e-5), modules["norm.out_bf16"])


@pytest.mark.parametrize("split", [1, 2, 5, 9])
@pytest.mark.parametrize("flat", [False, True], ids=["3d", "2d"])
def test_short_conv(modules, split, flat):
    x, weight = modules["conv.x"], modules["conv.weight"]
    weight = weight.squeeze(1) if flat else weight
    first, last = ref.short_conv(x[:split], weight, torch.zeros(6, 3))
    rest, last = ref.short_conv(x[split:], weight, last)
    assert_close(torch.cat([first, rest]), modules["conv.y"])
    assert torch.equal(last, modules["conv.state"][:, 1:])


# MXFP4.


@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_mxfp4_dequantise(goldens, name, dtype):
    golden = load_file(goldens / "mxfp4.safetensors")
    got = ref.mxfp4_dequantise(golden[f"{name}.weight_packed"], golden[f"{name}.weight_scale"], dtype)
    assert torch.equal(got.float(), golden[f"{name}.weight"].float())


def test_mxfp4_quantise(goldens):
    golden = load_file(goldens / "mxfp4.safetensors")
    packed, scale = ref.mxfp4_quantise(golden["a.source_bf16"])
    assert torch.equal(packed, golden["a.weight_packed"]) and torch.equal(scale, golden["a.weight_scale"])


def test_mxfp4_quantising_twice_changes_nothing():
    values = torch.randn(8, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 8).unsqueeze(1)
    values[3, :32] = 0
    once = ref.mxfp4_dequantise(*ref.mxfp4_quantise(values), torch.float32)
    assert torch.equal(ref.mxfp4_dequantise(*ref.mxfp4_quantise(once), torch.float32), once)
    assert (once[3, :32] == 0).all()


def test_mxfp4_refuses_what_it_cannot_hold():
    with pytest.raises(ValueError, match="48 columns"):
        ref.mxfp4_quantise(torch.zeros(2, 48))
    with pytest.raises(ValueError, match="not finite"):
        ref.mxfp4_quantise(torch.full((1, 32), torch.nan))


# The two forms of KDA.


def random_core(length: int, least: float, most: float, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Inputs of KDA for 3 heads of 32, with log-decay between ``least`` and ``most``."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = torch.randn(3, length, 3, 32, generator=generator, dtype=dtype).unbind(0)
    q, k = ref.normalise_qk(q, k)
    decay = least + (most - least) * torch.rand(length, 3, 32, generator=generator, dtype=dtype)
    beta = torch.rand(length, 3, generator=generator, dtype=dtype)
    return q, k, v, decay, beta, torch.randn(3, 32, 32, generator=generator, dtype=dtype)


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize(
    ("least", "most"), [(-5.0, -4.9), (-5.0, 0.0), (-1e-3, 0.0), (-60.0, -50.0)], ids=["hard", "all", "none", "beyond"]
)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 130])
def test_chunked_equals_recurrent(length, least, most, chunk):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
        inputs = random_core(length, least, most, dtype)
        for got, want in zip(ref.kda_chunked(*inputs, chunk), ref.kda_recurrent(*inputs), strict=True):
            assert_close(got, want, tolerance)


def test_chunked_of_no_tokens_keeps_the_state():
    inputs = random_core(0, -5.0, 0.0)
    o, state = ref.kda_chunked(*inputs)
    assert o.shape == (0, 3, 32) and torch.equal(state, inputs[-1])


def test_gradients_of_the_two_forms_agree():
    grads = []
    for form in (ref.kda_recurrent, lambda *inputs: ref.kda_chunked(*inputs, 16)):
        inputs = [tensor.requires_grad_() for tensor in random_core(37, -5.0, 0.0)]
        o, state = form(*inputs)
        (o.square().sum() + state.sum()).backward()
        grads.append([tensor.grad for tensor in inputs])
    for got, want in zip(*grads, strict=True):
        assert_close(got, want, 1e-11)


def test_unbounded_decay():
    f = torch.tensor([[[0.5, -2.0]]])
    got = ref.log_decay(f, torch.tensor([0.3, 9.0]), torch.tensor([0.1, 0.2]), None)
    want = -torch.tensor(0.3).exp() * torch.tensor([0.6, -1.8]).exp().log1p()
    assert_close(got[0, 0], want)


# Autograd through the whole model.


@pytest.mark.parametrize("chunk", [None, 16], ids=["recurrent", "chunk16"])
def test_whole_model_gradient_matches_finite_differences(config, weights, goldens, io, chunk):
    experts = load_file(goldens / "text_tiny.experts_dequant.safetensors")
    rest = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    params = {name: tensor.double().requires_grad_() for name, tensor in (rest | experts).items()}
    ids = io["len17.input_ids"]

    def loss() -> Tensor:
        logits = KimiK3(config, params, torch.float64, chunk=chunk).forward(ids)
        return torch.nn.functional.cross_entropy(logits[:-1], ids[1:])

    loss().backward()
    used = {name: tensor for name, tensor in params.items() if tensor.grad is not None}
    idle = {name for name in params if name not in used}
    # The correction bias only chooses, and no token reached the experts without a gradient.
    assert all(".experts." in name or name.endswith("e_score_correction_bias") for name in idle)
    # One direction through all weights at once, small enough that no routing flips.
    generator = torch.Generator().manual_seed(1)
    step = {name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64) for name, tensor in used.items()}
    slope = sum((tensor.grad * step[name]).sum() for name, tensor in used.items())
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            for name, tensor in used.items():
                tensor += sign * 1e-6 * step[name]
            sides.append(loss())
            for name, tensor in used.items():
                tensor -= sign * 1e-6 * step[name]
    assert ((sides[0] - sides[1]) / 2e-6 - slope).abs() <= 1e-5 * slope.abs()


def test_fp32_parameters_train_a_bf16_model(config, weights, io):
    params = {name: t.float().requires_grad_() if t.is_floating_point() else t for name, t in weights.items()}
    logits = KimiK3(config, params, torch.bfloat16, chunk=16).forward(io["len17.input_ids"])
    logits.float().logsumexp(-1).sum().backward()
    grad = params["language_model.model.layers.0.self_attn.A_log"].grad
    assert grad is not None and grad.dtype == torch.float32
    assert grad[:8].abs().min() > 0 and torch.isfinite(grad).all()
    assert (grad[8:] == 0).all(), "entries past the heads are padding"


# Reading a config and a checkpoint.


def test_config_of_the_release(shared):
    published = json.loads((shared / "data" / "checkpoint" / "config.json").read_text())
    config = K3Config.from_dict(published)
    assert config == K3Config.from_dict(published["text_config"])
    mla = [i for i in range(config.num_hidden_layers) if i not in config.kda_layers]
    assert mla == [*range(3, 92, 4), 92]
    assert (config.kda_heads, config.kda_head_dim, config.kda_gate_lower_bound) == (96, 128, -5.0)


def test_config_without_a_field_names_it(goldens):
    published = json.loads((goldens / "text_tiny.config.json").read_text())
    del published["kv_lora_rank"]
    with pytest.raises(ValueError, match="kv_lora_rank"):
        K3Config.from_dict(published)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("nested", [True, False], ids=["kimi_k3", "text_only"])
def test_load_checkpoint(tmp_path, goldens, weights, io, shards, nested):
    text = json.loads((goldens / "text_tiny.config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "kimi_k3", "text_config": text} if nested else text)
    )
    stored = {name if nested else name.removeprefix("language_model."): tensor for name, tensor in weights.items()}
    stored["vision_tower.patch_embed.proj.weight"] = torch.zeros(2)
    if shards == 1:
        save_file(stored, tmp_path / "model.safetensors")
    else:
        files = [f"model-{i}.safetensors" for i in range(shards)]
        where = {name: files[i % shards] for i, name in enumerate(stored)}
        for file in files:
            save_file({name: stored[name] for name in stored if where[name] == file}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    model = ref.load_checkpoint(tmp_path, torch.float32)
    assert (model.forward(io["len16.input_ids"]) - io["len16.logits"]).abs().max() <= 1e-4
    assert not any("vision" in name for name in model.weights)
