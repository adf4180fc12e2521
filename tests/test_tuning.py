"""XLA's tuning results: read, merged, and the files that tfbench ships."""

import configparser
import fnmatch
import re

import pytest
from run_helpers import ROOT

from tfbench.hardware import specs, tuning


def entry(size=8, device="H200", choice="gemm {\n      algorithm: -1\n    }"):
    return (
        f'  device: "{device}"\n  hlo: "{{\\n  ROOT a = \\"f16[{size}]\\"\\n}}"\n'
        f"  result {{\n    {choice}\n  }}\n  version: 22\n}}\n"
    )


def text(*entries):
    return "version: 3\n" + "".join(f"results {{\n{each}" for each in entries)


class TestRead:
    def test_each_operation_has_its_lines(self):
        first, second = entry(8), entry(16)
        found = tuning.read(text(first, second))
        assert list(found.values()) == [first, second]
        assert [device for device, _ in found] == ['"H200"'] * 2
        assert tuning.write(found) == text(*sorted((first, second)))

    @pytest.mark.parametrize(
        ("damaged", "message"),
        [
            ("", "begins with ''"),
            (text(entry()).replace("version: 3", "version: 4"), "begins with 'version: 4"),
            ("\n" + text(entry()), "begins with"),
            (text(entry())[:-2], "result 1 of 1 is not whole"),
            (text(entry(), entry(16)[:60]), "result 2 of 2"),
            (text(entry() + "}\n"), "'}.n' does not belong there"),
            (text(entry().replace("algorithm: -1", "algorithm -1")), "does not belong there"),
            (text(entry().replace('H200"', "H200")), "does not belong there"),
            (text(entry().replace("  version: 22\n", "")), "is not whole"),
            # XLA takes every result for one of its own version, so that these two would be one for it.
            (text(entry(), entry().replace("version: 22", "version: 21")), "is the second for its operation"),
        ],
    )
    def test_what_xla_would_refuse_is_refused(self, damaged, message):
        with pytest.raises(ValueError, match=message):
            tuning.read(damaged)


class TestMerge:
    def test_the_earlier_file_wins_and_order_is_by_operation(self):
        triton = entry(8, choice="triton {\n      block_m: 64\n    }")
        files = [tuning.read(text(entry(9), triton)), tuning.read(text(entry(8), entry(7)))]
        assert tuning.write(tuning.merge(files)) == text(entry(7), triton, entry(9))

    def test_a_place_in_the_list_of_one_cublas_is_left_out(self):
        listed = [
            entry(8, choice="gemm {\n      algorithm: 3\n    }"),
            entry(9, choice="gemm {\n      autotune_workspace_size: 4\n      algorithm: 0\n    }"),
        ]
        kept = entry(10, choice="algorithm {\n      algo_id: 3\n    }")  # cuDNN's, which XLA compares
        assert list(tuning.merge([tuning.read(text(*listed, kept))]).values()) == [kept]

    def test_devices_are_not_mixed(self):
        with pytest.raises(ValueError, match='one device, not of "A", "B"'):
            tuning.merge([tuning.read(text(entry(device="A"))), tuning.read(text(entry(device="B")))])


@pytest.mark.parametrize("path", sorted(tuning.SHIPPED.iterdir()), ids=lambda path: path.name)
class TestShippedFiles:
    def test_is_of_the_card_and_cudnn_in_its_name(self, path):
        found = tuning.read(path.read_text(encoding="utf-8"))
        assert found
        (device,) = {device for device, _ in found}
        tensorflow, cudnn = re.fullmatch(r".+-tensorflow_(.+)-cudnn_(.+)\.txt", path.name).groups()
        assert device.endswith(f'DNN version: {cudnn}"')
        card = next(
            name
            for spec in specs.load()
            for name in spec.nvml_names
            if tuning.file_name(name, tensorflow, cudnn) == path.name
        )
        facts = {"gpu_name": card, "tensorflow": tensorflow, "nvidia-cudnn-cu12": f"{cudnn}.1"}
        assert tuning.shipped(facts) == path

    def test_is_as_the_merge_writes_it(self, path):
        content = path.read_text(encoding="utf-8")
        assert tuning.write(tuning.merge([tuning.read(content)])) == content

    def test_is_in_the_wheel(self, path):
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg")
        patterns = setup["options.package_data"]["tfbench.hardware"].split(", ")
        inside = path.relative_to(ROOT / "tfbench" / "hardware").as_posix()
        assert any(fnmatch.fnmatch(inside, pattern) for pattern in patterns)
