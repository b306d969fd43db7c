from pathlib import Path

from setuptools import find_packages, setup

TRAIN = [
    "scipy>=1.11",
    "numba>=0.61,<0.69",
    "torch_geometric>=2.7",
    "pymetis>=2023.1",
    "psutil>=5.9",
    "safetensors>=0.4",
    "typeguard>=4.3",
    "xxhash>=3.5",
    "filelock>=3.12",
    "matplotlib>=3.8",
    "polars>=1.20",
    "tqdm>=4.66",
    "tyro>=0.9",
    "jinja2>=3.1",
    "tomli>=2; python_version < '3.11'",
]

setup(
    name="megagraph",
    version="0.1.0",
    description="Graph Transformers on large graphs: exact attention with a learnable structural bias",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["megagraph*"]),  # megagraph/kernels is a link to kernels/
    package_data={
        "megagraph": ["py.typed", "*.pyi", "report.html"],
        "megagraph.planner": ["*.pyi"],
        "megagraph.kernels": ["tiles.json"],
    },
    entry_points={"console_scripts": ["megagraph = megagraph.__main__:main"]},
    install_requires=[
        "torch>=2.11,<2.14",
        "numpy>=1.26",
        "lazy_loader>=0.4",
    ],
    extras_require={
        "ogb": ["ogb>=1.3.6"],
        "train": TRAIN,
        "docs": ["mkdocs-material>=9.6,<10", "mkdocstrings[python]>=1.0"],
        "test": [
            *TRAIN,
            "triton>=3.6,<3.8; platform_system == 'Linux'",  # its interpreter; torch for a GPU brings its own
            "pytest>=8,<9.2",  # pytest-xdist 3.8 puts no tests into groups with 9.2
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "pytest-benchmark>=5",
            "tensorboard>=2.16",
            "wandb>=0.20",
            "hypothesis>=6.100",
            "ruff>=0.12",
            "mypy>=1.11",
            "import-linter>=2.1",
        ],
    },
)
