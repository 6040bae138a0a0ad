"""Chat templates in the styles of well-known models, written for these tests."""

from __future__ import annotations

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# The system turn moves into the first user turn; contents are stripped; roles must alternate.
LLAMA2 = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set turns = messages %}
{%- endif %}
{%- for m in turns %}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate: user, assistant, user, ...') }}
    {%- endif %}
    {%- set content = (system if loop.first else '') + m['content'] %}
    {%- if m['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}
    {{- m['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

MISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m['role'] == 'user' %}
        {{- '[INST]' + m['content'] + '[/INST]' }}
    {%- elif m['role'] == 'assistant' %}
        {%- generation %}{{- m['content'] + eos_token }}{% endgeneration %}
    {%- elif m['role'] == 'system' %}
        {{- '[SYSTEM_PROMPT]' + m['content'] + '[/SYSTEM_PROMPT]' }}
    {%- else %}
        {{- raise_exception('unknown role ' ~ m['role']) }}
    {%- endif %}
{%- endfor %}
"""

# Thinking of turns before the last user's is dropped; the last reply always shows some.
THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- set content = m.content %}
    {%- set thought = '' %}
    {%- if m.role == 'assistant' and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].rstrip('\n') %}
        {%- set thought = thought.split('<think>')[-1].lstrip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) %}
        {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

# Renames the assistant, knows no system.
NO_SYSTEM = """\
{%- for m in messages %}
    {%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
    {%- set role = 'model' if m.role == 'assistant' else m.role %}
    {{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""

# Leaves out all but the last three turns, and writes the last one in capitals twice.
FORGETFUL = """\
{%- for m in messages[-3:] %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{{- 'Again: ' + messages[-1].content | upper + '\n' }}
"""

ALL = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "thinking": THINKING,
    "no system": NO_SYSTEM,
    "forgetful": FORGETFUL,
}

CONTROL = (
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<think>",
    "</think>",
    "<start_of_turn>",
    "<end_of_turn>",
)
