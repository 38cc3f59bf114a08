"""The tangent of backward: its kernel with a tangent of every product and sum.

Along tangents of the inputs and of the cotangents, with the names of `kernels/backward.py` and a dot for a tangent:

    Ṡ = tangent of score along scale · (Q̇ Kᵀ + Q K̇ᵀ), + ḃias         Ṗ = P · (Ṡ − l̇se)
    dṠ = Ṗ · G + P · Ġ        G = dP + c − dH (log P + 1)            Ġ = dṖ + ċ − dḢ (log P + 1) − dH (Ṡ − l̇se)
    dṪ = scale · (dṠ · ∂score + dS · its tangent)                     dṖ = D · (dȮ Vᵀ + dO V̇ᵀ)
    dQ˙ = dṪ K + dT K̇         dK˙ = dṪᵀ Q + dTᵀ Q̇                    dV˙ = (Ṗ · D)ᵀ dO + (P · D)ᵀ dȮ

Twelve products replace backward's five. Inputs without a tangent drop a term, which is known at run time.
"""

from regard.engines.cpu.kernels.backward import Formulas
from regard.engines.cpu.kernels.backward_terms import Products
from regard.engines.cpu.kernels.score_gradients import ScoreVector
from regard.engines.cpu.kernels.softmax import bounded
from regard.engines.cpu.language.values import Value


def weights_of(x: ScoreVector) -> tuple[Value, ...]:
    """Return P · D, dT and their tangents."""
    k, spec, numbers, scales, zero = x.k, x.spec, x.numbers, x.scales, x.k.constant(x.spec.real, 0.0)
    S_dot = x.load("P_dot") * (scales.gradient if spec.paired else 1 / scales.exponent)
    (s, *results), seen = x.scores(ds=S_dot)
    if spec.score is not None:
        S_dot, *results = results
    if spec.bias_dot:
        S_dot = S_dot + x.load("bias_dot")
    difference, grown = s - numbers["lse"], S_dot - numbers["lse_dot"]
    P = x.weight(difference)
    dP, dP_dot, PD = x.load("dS"), x.load("dS_dot"), P
    if spec.dropout:
        D = x.dropout_scale()
        dP, dP_dot, PD = dP * D, dP_dot * D, P * D
    G, G_dot = dP + numbers["c"], dP_dot + numbers["c_dot"]
    if spec.entropy:
        surprise = bounded(k, difference * (1 / scales.exponent)) + 1.0
        G = G - numbers["d_entropy"] * surprise
        G_dot = G_dot - numbers["d_entropy_dot"] * surprise - numbers["d_entropy"] * grown
    G_dot = k.fma(grown, G, G_dot)  # dṠ / P
    dS, dS_dot = k.where(seen, P * G, zero), k.where(seen, P * G_dot, zero)
    dT, dT_dot = dS * scales.gradient, dS_dot * scales.gradient
    if spec.nonlinear:
        derivative, derivative_dot, *results = results
        dT_dot = k.where(seen, dT_dot * derivative + dT * derivative_dot, zero)
        dT = k.where(seen, dT * derivative, zero)
    x.add([dS_dot, dS], results, seen)
    return k.where(seen, PD, -zero), dT, k.where(seen, PD * grown, zero), dT_dot


TANGENT = Formulas(
    Products(
        scores={
            "P": [("k", "q")],
            "dS": [("v", "dout")],
            "P_dot": [("k", "q_dot"), ("k_dot", "q")],
            "dS_dot": [("v", "dout_dot"), ("v_dot", "dout")],
        },
        dq=[("k", "dS_dot"), ("k_dot", "dS")],
        dv=[("P_dot", "dout"), ("P", "dout_dot")],
        dk=[("dS_dot", "q"), ("dS", "q_dot")],
    ),
    numbers={"d_entropy": "d_entropy", "lse_dot": "lse_dot", "c_dot": "given_dot", "d_entropy_dot": "d_entropy_dot"},
    rests=[("c", "dout", "out"), ("c_dot", "dout", "out_dot"), ("c_dot", "dout_dot", "out")],
    weights_of=weights_of,
)
