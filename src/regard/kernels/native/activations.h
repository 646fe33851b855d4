// What may follow a projection, number by number.
#pragma once
#include "args.h"
#include "simd.h"

namespace REGARD_NAMESPACE {

inline F absolute(F x) { return choose(x < 0.0f, -x, x); }

// x * sigmoid(argument), by exp of what is not positive, which cannot overflow.
inline F times_sigmoid(F x, F argument) {
    const F e = exp2(absolute(argument) * -1.4426950408889634f);
    return x * choose(argument < 0.0f, e, broadcast(1.0f)) / (1.0f + e);
}

// x times the normal distribution's share below x. With a = |x|, the share beyond a is exp(-a a / 2) g(a), where g
// falls from 0.5 as smoothly as 1 / a: a polynomial in t = 1 / (1 + 0.27 a), within 1.6e-8 of it for all a up to 13.2,
// beyond which the share is 0 in float32. (Fitted for the smallest relative error, and rounded.)
inline F gelu(F x) {
    const F a = absolute(x);
    const F t = 1.0f / (1.0f + 0.27f * a);
    F g = broadcast(0x1.b3c048p-6f);
    g = g * t - 0x1.d239fap-4f;
    g = g * t + 0x1.1fafep-3f;
    g = g * t - 0x1.f81292p-6f;
    g = g * t + 0x1.39026p-4f;
    g = g * t + 0x1.6ade04p-4f;
    g = g * t + 0x1.8a0e7p-4f;
    g = g * t + 0x1.bd50d2p-4f;
    g = g * t + 0x1.b8a7d6p-4f;
    g = g * t + 0x1.d54f7ap-18f;
    const F beyond = g * exp2(a * a * -0.7213475204444817f);
    return x * choose(x < 0.0f, beyond, 1.0f - beyond);
}

inline F activated(int32_t after, F x) {
    switch (after) {
    case REGARD_GELU:
        return gelu(x);
    case REGARD_GELU_TANH:
        return times_sigmoid(x, 1.5957691216057308f * (x + 0.044715f * x * x * x));
    case REGARD_QUICK_GELU:
        return times_sigmoid(x, 1.702f * x);
    case REGARD_RELU:
        return larger(F{}, x);
    case REGARD_SILU:
        return times_sigmoid(x, x);
    case REGARD_TANH:
        return tanh(x);
    default:
        return x;
    }
}

}  // namespace REGARD_NAMESPACE
