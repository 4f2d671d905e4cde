import ml_dtypes
import numpy as np
import pytest

from flashpoint.dtypes import DTYPES, dtype_of, name_of
from flashpoint.errors import LayoutError


@pytest.mark.parametrize("name", [name for name, row in DTYPES.items() if row.numpy is not None])
def test_a_dtypes_name_is_numpys_own(name):
    row = dtype_of(name)
    assert name_of(row.numpy) == name
    assert row.itemsize == row.numpy.itemsize


def test_c_names_are_the_same_dtypes():
    for alias, name in [("intc", "int32"), ("longlong", "int64"), ("double", "float64"), ("?", "bool")]:
        assert name_of(np.dtype(alias)) == name


@pytest.mark.parametrize(
    "dtype", ["O", "U3", "S3", "M8[s]", "m8[s]", "V8", "f4,i4", "(2,)f4", ">f4", "g", "G"]
)
def test_what_has_no_fixed_portable_bytes_is_refused(dtype):
    with pytest.raises(LayoutError, match="cannot be stored"):
        name_of(np.dtype(dtype))


def test_dtypes_without_a_numpy_type_have_a_size():
    assert dtype_of("complex32").itemsize == 4
    assert dtype_of("float4_e2m1fn_x2").itemsize == 1
    assert dtype_of("complex32").numpy is None


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(LayoutError, match=r"'float128' is unknown.*bfloat16"):
        dtype_of("float128")


def test_ml_dtypes_are_native():
    assert name_of(np.dtype(ml_dtypes.bfloat16)) == "bfloat16"
