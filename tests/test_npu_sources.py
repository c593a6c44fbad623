# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What is relied on in torch_npu, which runs on Ascend NPUs alone, by the sources of each minor
version that goes with a torch that is supported."""

import re
from pathlib import Path

import pytest
import torch

from megatron_asynchzp.attention.call import AttentionCall
from megatron_asynchzp.attention.vendors import fusion_options
from megatron_asynchzp.engine import device
from tests.attention.cases import masks
from tests.support.sources import (
    defined_names,
    parameters_of_function,
    parameters_of_method,
    sources,
)

VERSIONS = ["2.11", "2.12", "2.13", "2.14"]
OPERATOR = "npu_fusion_attention_forward"


@pytest.fixture(scope="module", params=VERSIONS)
def torch_npu(request, tmp_path_factory) -> Path:
    return sources(tmp_path_factory.mktemp("npu"), "torch_npu", request.param)


def options_of(name: str) -> set[str]:
    mask = masks()[name]
    like = torch.zeros(1, 2, mask.num_queries, 8), torch.zeros(1, 2, mask.num_keys, 8)
    return set(fusion_options(AttentionCall(like[0], like[1], like[1], mask, 0.5)))


@pytest.mark.slow
def test_the_operator_takes_what_each_kind_of_mask_is_handed_as(torch_npu):
    found = parameters_of_function(torch_npu / "op_plugin/meta/_meta_registrations.py", OPERATOR)
    assert found[:5] == ["query", "key", "value", "head_num", "input_layout"]
    assert set().union(*map(options_of, masks())) <= set(found[5:])


@pytest.mark.slow
def test_the_operator_is_documented_with_the_numbers_that_it_is_given(torch_npu):
    text = (torch_npu / "_op_plugin_docs.py").read_text()
    text = text[text.index('"npu_fusion_attention",') :]
    text = text[: text.index("_add_torch_npu_docstr", 10)]
    assert re.search(r"^0: defaultMask", text, re.MULTILINE)
    assert re.search(r"^3: rightDownCausal", text, re.MULTILINE)
    assert re.search(r"^4: band", text, re.MULTILINE)
    assert "2048*2048" in text and "next_tockens=2147483647" in text
    assert "inner_precise=0" in text and re.search(
        r"inner_precise(.|\n){0,90}0、1(.|\n){0,20}2", text
    )


@pytest.mark.slow
def test_a_device_has_the_names_of_cuda(torch_npu):
    names = set(re.findall(r"self\._module\.(\w+)", Path(device.__file__).read_text()))
    assert len(names) > 5
    of_npu = [*(torch_npu / "npu").glob("*.py")]
    assert names <= set().union(*map(defined_names, of_npu))
    file = torch_npu / "npu" / "streams.py"
    assert {"device", "priority"} <= set(parameters_of_method(file, "Stream", "__new__"))
    assert "enable_timing" in parameters_of_method(file, "Event", "__new__")


@pytest.mark.slow
def test_megatrons_calls_of_cuda_are_mapped(torch_npu):
    text = (torch_npu / "contrib" / "transfer_to_npu.py").read_text()
    assert "torch.cuda" in text and "hccl" in text
