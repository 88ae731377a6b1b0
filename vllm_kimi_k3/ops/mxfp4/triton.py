"""MXFP4 bytes to values inside kernels.

An E2M1 code is a sign, two bits of exponent and one of mantissa. Put at the same fields of a wider float it is the
value times 2^-126 (the difference of the biases), its subnormal included; scales are moved by 2^63 so that products
with them are normal, and a sum of products is multiplied by :data:`UNBIAS` once. A group's scale may be 2^-62 to 2^64.
"""

import triton
import triton.language as tl

#: What a sum of products with :func:`scaled`, or with :func:`raw` times :func:`scales`, is multiplied by.
UNBIAS = tl.constexpr(2.0**63)

# The two values of each of four bytes, as two pairs of bf16 each, times the scales: a byte goes to the low end of
# each half word; one multiplication moves sign and magnitude to their fields, a mask clears the rest.
_BF16 = tl.constexpr("""{
    .reg .b32 low, high, t, zero;
    mov.b32 zero, 0x80008000;
    prmt.b32 low, $4, 0, 0x4140;
    prmt.b32 high, $4, 0, 0x4342;
    and.b32 t, low, 0x000F000F;
    mul.lo.u32 t, t, 0x1040;
    and.b32 t, t, 0x81C081C0;
    fma.rn.bf16x2 $0, t, $5, zero;
    and.b32 t, high, 0x000F000F;
    mul.lo.u32 t, t, 0x1040;
    and.b32 t, t, 0x81C081C0;
    fma.rn.bf16x2 $1, t, $6, zero;
    and.b32 t, low, 0x00F000F0;
    mul.lo.u32 t, t, 0x0104;
    and.b32 t, t, 0x81C081C0;
    fma.rn.bf16x2 $2, t, $5, zero;
    and.b32 t, high, 0x00F000F0;
    mul.lo.u32 t, t, 0x0104;
    and.b32 t, t, 0x81C081C0;
    fma.rn.bf16x2 $3, t, $6, zero;
}""")

# The two values of each of four bytes as fp32.
_FP32 = tl.constexpr("""{
    .reg .b32 t, moved;
    shr.u32 moved, $8, 8;
    and.b32 t, $8, 0x0000000F;
    mul.lo.u32 t, t, 0x10400000;
    and.b32 $0, t, 0x81C00000;
    and.b32 t, $8, 0x000000F0;
    mul.lo.u32 t, t, 0x01040000;
    and.b32 $4, t, 0x81C00000;
    and.b32 t, $8, 0x00000F00;
    mul.lo.u32 t, t, 0x00104000;
    and.b32 $1, t, 0x81C00000;
    and.b32 t, $8, 0x0000F000;
    mul.lo.u32 t, t, 0x00010400;
    and.b32 $5, t, 0x81C00000;
    and.b32 t, $8, 0x000F0000;
    mul.lo.u32 t, t, 0x00001040;
    and.b32 $2, t, 0x81C00000;
    and.b32 t, $8, 0x00F00000;
    mul.lo.u32 t, t, 0x00000104;
    and.b32 $6, t, 0x81C00000;
    and.b32 t, moved, 0x000F0000;
    mul.lo.u32 t, t, 0x00001040;
    and.b32 $3, t, 0x81C00000;
    and.b32 t, moved, 0x00F00000;
    mul.lo.u32 t, t, 0x00000104;
    and.b32 $7, t, 0x81C00000;
}""")


@triton.jit
def scales(byte):
    """Scale bytes to fp32, times 2^63."""
    return ((tl.minimum(byte.to(tl.int32), 191) + 63) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _value(code):
    """A code in the low four bits of an int32 to fp32, times 2^-126."""
    return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True)


@triton.jit
def raw(byte, PTX: tl.constexpr):
    """Low and high values of bytes in fp32, times 2^-126, without their scales."""
    if PTX:
        low, high = tl.inline_asm_elementwise(
            _FP32, "=r,=r,=r,=r,=r,=r,=r,=r,r", [byte], dtype=(tl.int32, tl.int32), is_pure=True, pack=4
        )
        low = low.to(tl.float32, bitcast=True)
        high = high.to(tl.float32, bitcast=True)
    else:
        code = byte.to(tl.int32)
        low = _value(code)
        high = _value(code >> 4)
    return low, high


@triton.jit
def scaled(byte, scale, KIND: tl.constexpr, PTX: tl.constexpr):
    """Low and high values of bytes times their scales, divided by :data:`UNBIAS`.

    Args:
        byte: uint8.
        scale: fp32 of the same shape, from :func:`scales`.
        KIND: dtype of the result.
        PTX: use NVIDIA's instructions; the result is bf16 then.
    """
    if PTX:
        low, high = tl.inline_asm_elementwise(
            _BF16,
            "=r,=r,=r,=r,r,r,r",
            [byte, scale.to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = raw(byte, False)
        low = (low * scale).to(KIND)
        high = (high * scale).to(KIND)
    return low, high
