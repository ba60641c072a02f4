"""vLLM's Python and what each line of it is here: run by `test_coming_from_vllm`, shown in docs/coming-from-vllm.md."""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """code: as in a script for vLLM, `llm` and `params` being there; holds: of what it gives back, `found`."""

    code: str
    here: str
    holds: str


LINES = (
    Line("llm.generate('The capital of France is', params)", "The same.", "'Paris' in found[0].outputs[0].text"),
    Line(
        "llm.generate(['a', 'b'], params, use_tqdm=False)",
        "The same. `True`, the default, shows a bar on a terminal only.",
        "[o.prompt for o in found] == ['a', 'b']",
    ),
    Line("llm.generate('a', params, use_tqdm=bar)", "The same: `bar(total=, desc=)` makes it.", "bar.made[0].n == 1"),
    Line(
        "llm.generate({'prompt': 'a'}, params, lora_request=None)",
        "The same: a `LoRARequest`, or one for each prompt, with `enable_lora=True` ([adapters](lora.md)).",
        "found[0].prompt == 'a'",
    ),
    Line(
        "llm.generate({'prompt_token_ids': [504, 3575]}, params)", "The same.",
        "found[0].prompt_token_ids == [504, 3575]",
    ),
    Line("llm.generate(TextPrompt(prompt='a'), params)", "The same.", "found[0].prompt == 'a'"),
    Line(
        "llm.generate([TokensPrompt(prompt_token_ids=[504]), [3575]], params)",
        "The same, and a list of ids by itself.",
        "[o.prompt_token_ids for o in found] == [[504], [3575]]",
    ),
    Line(
        "llm.generate('a', SamplingParams(structured_outputs=StructuredOutputsParams(choice=['yes', 'no'])))",
        "The same; `guided_decoding=`, its older name, takes it, too ([structured output](structured-output.md)).",
        "found[0].text in ('yes', 'no')",
    ),
    Line(
        "SamplingParams(stop=None, top_k=None, seed=None, bad_words=None, structured_outputs=None, extra_args=None)",
        "The same: None is a field's default. What is not there yet is refused by its name when it is used.",
        "found == SamplingParams()",
    ),
    Line(
        "llm.generate('a', SamplingParams(max_tokens=1, logprobs=2))[0].outputs[0].logprobs[0]",
        "The same: from token ids to `Logprob(logprob, rank, decoded_token)`, that of the chosen token first.",
        "sorted(e.rank for e in found.values())[:2] == [1, 2] and all(e.decoded_token for e in found.values())",
    ),
    Line(
        "llm.generate('a', SamplingParams(max_tokens=3, allowed_token_ids=[5, 6]))", "The same.",
        "set(found[0].outputs[0].token_ids) <= {5, 6}",
    ),
    Line("llm.get_default_sampling_params().temperature", "The same: of generation_config.json.", "found == 0.2"),
    Line(
        "llm.chat([{'role': 'user', 'content': 'Hi'}], params, chat_template_kwargs={'enable_thinking': False})",
        "The same; so are a list of conversations, `chat_template=`, `tools=`, `add_generation_prompt=`.",
        "found[0].prompt.endswith('assistant\\n')",
    ),
    Line(
        "llm.chat([{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Oh'}], params, "
        "add_generation_prompt=False, continue_final_message=True)",
        "The same.", "found[0].prompt.endswith('assistant\\nOh')",
    ),
    Line(
        "llm.get_tokenizer().apply_chat_template([{'role': 'user', 'content': 'Hi'}], tokenize=False)",
        "The words most scripts use, over this package's tokenizer: `encode`, `decode`, calling it, "
        "`apply_chat_template`, `eos_token_id`, `convert_ids_to_tokens`, ... For more, transformers reads its files.",
        "found.endswith('Hi<|im_end|>\\n')",
    ),
    Line(
        "(tokenizer := llm.get_tokenizer()).decode(tokenizer('a b').input_ids)", "The same.",
        "found == 'a b' and tokenizer.eos_token_id == 2 and len(tokenizer) == 49152",
    ),
    Line(
        "llm.beam_search([{'prompt': 'The capital of France is'}], BeamSearchParams(beam_width=2, max_tokens=3))",
        "The same, up to a width of 10.",
        "[s.text.partition(' is ')[2][:5] for s in found[0].sequences] == ['Paris', 'Paris']",
    ),
    Line(
        "llm.get_metrics()", "The same names, of one engine; times are the server's.",
        "{m.name for m in found} >= {'vllm:num_requests_running', 'vllm:kv_cache_usage_perc'}",
    ),
    Line(
        "llm.embed(['a', 'b'], pooling_params=PoolingParams(normalize=True))",
        "The same, also of a model that generates; so are `encode`, `score`, `classify` ([embeddings](embeddings.md)).",
        "[len(o.outputs.embedding) for o in found] == [576, 576]",
    ),
    Line("llm.reset_prefix_cache()", "The same.", "found is True"),
    Line(
        "llm.collective_rpc(lambda worker: worker.rank)",
        "The same where the rank is in this process (`uni`). Elsewhere a method's name, as ever.", "found == [0]",
    ),
    Line("llm.collective_rpc('resident')", "The same; `worker_extension_cls` adds methods.", "found[0] > 0"),
)  # fmt: skip
