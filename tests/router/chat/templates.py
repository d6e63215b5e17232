"""Chat templates in the formats of published families, written by hand, and conversations to try them on."""

from __future__ import annotations

from typing import Any

LOOP = "{% for message in messages %}"
END = "{% endfor %}"

TEMPLATES = {
    "chatml": LOOP + "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}" + END
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "qwen3": "{%- for message in messages -%}\n<|im_start|>{{ message['role'] }}\n{{ message.content | trim }}"
    "<|im_end|>\n{% endfor -%}\n"
    "{%- if add_generation_prompt %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "llama-2": "{% if messages[0]['role'] == 'system' %}"
    "{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant take turns') }}{% endif %}"
    "{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "llama-3": "{{ bos_token }}" + LOOP
    + "{{ '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\n\n' ~ message.content | trim ~ '<|eot_id|>' }}"
    + END
    + "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "mistral": "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    + LOOP + "{% if message.role == 'user' %}[INST] {{ message.content }}[/INST]"
    "{% elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}{% endif %}" + END,
    "gemma": "{{ bos_token }}" + LOOP + "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "<start_of_turn>{{ role }}\n{{ message.content | trim }}<end_of_turn>\n" + END
    + "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "phi-3": LOOP + "{{ '<|' ~ message.role ~ '|>\n' ~ message.content ~ '<|end|>\n' }}" + END
    + "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}",
    "zephyr": LOOP + "<|{{ message.role }}|>\n{{ message.content + eos_token }}\n" + END
    + "{% if add_generation_prompt %}{{ '<|assistant|>' }}\n{% endif %}",
    "vicuna": "A chat between a user and an assistant. " + LOOP
    + "{% if message.role == 'user' %}USER: {{ message.content }} {% elif message.role == 'assistant' %}"
    "ASSISTANT: {{ message.content }}</s>{% else %}{{ message.content }} {% endif %}" + END
    + "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    "chatglm3": "[gMASK]sop" + LOOP + "<|{{ message.role }}|>\n {{ message.content }}" + END
    + "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "baichuan2": LOOP + "{% if message.role == 'user' %}<reserved_106>{{ message.content }}"
    "{% elif message.role == 'assistant' %}"
    "<reserved_107>{{ message.content }}{% else %}{{ message.content }}{% endif %}" + END
    + "{% if add_generation_prompt %}<reserved_107>{% endif %}",
    "command-r": "{{ bos_token }}{% set ns = namespace(n=0) %}" + LOOP + "{% set ns.n = ns.n + 1 %}"
    "{% set names = {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'} %}"
    "<|START_OF_TURN_TOKEN|><|{{ names[message.role] }}_TOKEN|>{{ message.content }}<|END_OF_TURN_TOKEN|>" + END
    + "{% if add_generation_prompt and ns.n > 0 %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
}  # fmt: skip

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place, in °C <today>",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
# Formats of calls: how a template writes tools, calls and their results.
TOOL_TEMPLATES = {
    "hermes": "{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for one in tools %}\n{{ one | tojson }}{% endfor %}"
    "\n</tools>\nAnswer with <tool_call>\n{\"name\": …, \"arguments\": …}\n</tool_call><|im_end|>\n{% endif %}"
    + LOOP + "<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{% if message.role == 'tool' %}<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% else %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls %}\n<tool_call>\n{\"name\": \"{{ call.function.name }}\", \"arguments\": "
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n" + END
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama3": "{{ bos_token }}{% if tools is not none and tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    'Respond in the format {"name": function name, "parameters": dictionary}.\n\n'
    "{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}<|eot_id|>{% endif %}" + LOOP
    + "{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{ call.arguments | tojson }}}<|eot_id|>"
    "{% elif message.role in ('tool', 'ipython') %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ message.content if message.content is string else message.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>"
    "{% endif %}" + END
    + "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "mistral": "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | map(attribute='function') | list | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}" + LOOP
    + "{% if message.role == 'tool' %}{% if message.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}{% if call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}"
    "{% elif message.role == 'user' %}[INST] {{ message.content }}[/INST]"
    "{% else %} {{ message.content }}{{ eos_token }}{% endif %}" + END,
    # Arguments between tags: each on its own, texts without quotes.
    "qwen3_coder": "{% if tools %}{{ tools | tojson }}{% endif %}" + LOOP + "<|im_start|>{{ message.role }}\n"
    "{{ message.content }}{% for call in message.tool_calls %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments | items %}<parameter={{ name }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}<|im_end|>\n" + END + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "glm": "{% if tools %}{{ tools | tojson }}{% endif %}" + LOOP + "<|{{ message.role }}|>\n{{ message.content }}"
    "{% for call in message.tool_calls %}\n<tool_call>{{ call.function.name }}\n"
    "{% for name, value in call.function.arguments | items %}<arg_key>{{ name }}</arg_key>\n"
    "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}</tool_call>"
    "{% endfor %}" + END + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    "minimax": "{% if tools %}{{ tools | tojson }}{% endif %}" + LOOP + "]~b]{{ message.role }}\n{{ message.content }}"
    "{% if message.tool_calls %}\n<minimax:tool_call>\n{% for call in message.tool_calls %}"
    '<invoke name="{{ call.function.name }}">\n{% for name, value in call.function.arguments | items %}'
    '<parameter name="{{ name }}">{{ value if value is string else value | tojson }}</parameter>\n{% endfor %}'
    "</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}" + END
    + "{% if add_generation_prompt %}{{ ']~b]assistant\n' }}{% endif %}",
    "deepseek_v3": "{% if tools %}{{ tools | tojson }}{% endif %}" + LOOP + "<{{ message.role }}>{{ message.content }}"
    "{% if message.tool_calls %}<｜tool▁calls▁begin｜>{% for call in message.tool_calls %}<｜tool▁call▁begin｜>function"
    "<｜tool▁sep｜>{{ call.function.name }}\n```json\n{{ call.function.arguments | tojson }}\n```<｜tool▁call▁end｜>"
    "{% endfor %}<｜tool▁calls▁end｜>{% endif %}" + END + "{% if add_generation_prompt %}<assistant>{% endif %}",
    "nemotron": "{% if tools %}{{ tools | tojson }}{% endif %}" + LOOP + "<{{ message.role }}>{{ message.content }}"
    "{% if message.tool_calls %}<TOOLCALL>[{% for call in message.tool_calls %}{{ ', ' if not loop.first }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}{% endfor %}]</TOOLCALL>'
    "{% endif %}" + END + "{% if add_generation_prompt %}<assistant>{% endif %}",
}  # fmt: skip

SHORT = [{"role": "user", "content": "How are you?"}]
LONG = [
    {"role": "system", "content": " Be brief.\n"},
    {"role": "user", "content": "Straße & <b>\"quotes\"</b> 'too' 🌍"},
    {"role": "assistant", "content": "Yes.  "},
    {"role": "user", "content": "And\nnow?"},
]
