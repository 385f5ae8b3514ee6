//! Attention as one writes it in Rust, for the driver in C; with `wrong` it aligns the causal mask top-left.
use std::ffi::{c_char, c_int, CStr};
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// `relpos_case` of relpos_vectors.h.
#[repr(C)]
#[allow(dead_code)]
pub struct Case {
    name: *const c_char,
    scheme: *const c_char,
    sizes: [c_int; 7],
    causal: c_int,
    left: c_int,
    right: c_int,
    scale: f64,
    max_distance: c_int,
    rows: c_int,
    operands: [*const f32; 3],
    array: *const f32,
    out: *const c_int,
    atol: f64,
}

fn bucket(scheme: &str, rows: i64, max_distance: f64, d: i64) -> i64 {
    let (count, first, d) = match scheme {
        "t5" => (rows / 2, if d > 0 { rows / 2 } else { 0 }, d.abs()),
        _ => (rows, 0, (-d).max(0)),
    };
    let exact = count / 2;
    if d < exact {
        return first + d;
    }
    let ratio = (d as f64 / exact as f64).ln() / (max_distance / exact as f64).ln();
    first + (count - 1).min(exact + (ratio * (count - exact) as f64 + 1e-12).floor() as i64)
}

fn turned(scheme: &str, x: &[f32], position: i64) -> Vec<f64> {
    let mut found: Vec<f64> = x.iter().map(|&e| e as f64).collect();
    for pair in 0..if scheme.starts_with("rotary") { x.len() / 2 } else { 0 } {
        let (a, b) = if scheme == "rotary" { (pair, pair + x.len() / 2) } else { (2 * pair, 2 * pair + 1) };
        let (sin, cos) = (position as f64 * 1e4f64.powf(-2.0 * pair as f64 / x.len() as f64)).sin_cos();
        found[a] = x[a] as f64 * cos - x[b] as f64 * sin;
        found[b] = x[a] as f64 * sin + x[b] as f64 * cos;
    }
    found
}

/// # Safety
/// The driver gives cases of its own header, and as many numbers to write as the output has.
#[no_mangle]
pub unsafe extern "C" fn attend(case: *const Case, out: *mut f32) {
    let c = &*case;
    let [b, h, h_kv, l_q, l_k, d, d_v] = c.sizes.map(|n| n as usize);
    let scheme = CStr::from_ptr(c.scheme).to_str().unwrap();
    let counts = [b * h * l_q * d, b * h_kv * l_k * d, b * h_kv * l_k * d_v];
    let [q, k, v] = [0, 1, 2].map(|n| from_raw_parts(c.operands[n], counts[n]));
    let start = l_k as i64 - l_q as i64;
    for (row, o) in from_raw_parts_mut(out, b * h * l_q * d_v).chunks_mut(d_v).enumerate() {
        let (item, head, i) = (row / l_q / h, row / l_q % h, (row % l_q) as i64);
        let keys = (item * h_kv + head / (h / h_kv)) * l_k;
        let query = turned(scheme, &q[row * d..][..d], i + start);
        let score = |j: usize| {
            let away = j as i64 - i - start;
            let ahead = if cfg!(wrong) { away + start } else { away };
            let (left, right) = (c.left as i64, c.right as i64);
            if (c.causal != 0 && ahead > 0) || (left >= 0 && away < -left) || (right >= 0 && away > right) {
                return f64::NEG_INFINITY;
            }
            let key = turned(scheme, &k[(keys + j) * d..][..d], j as i64);
            let product: f64 = query.iter().zip(&key).map(|(x, y)| x * y).sum();
            c.scale * product
                + match scheme {
                    "alibi" => -(*c.array.add(head) as f64) * away.abs() as f64,
                    "t5" | "t5_decoder" => {
                        let at = bucket(scheme, c.rows as i64, c.max_distance as f64, away) as usize;
                        *c.array.add(at * h + head) as f64
                    }
                    _ => 0.0,
                }
        };
        let s: Vec<f64> = (0..l_k).map(score).collect();
        let top = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = s.iter().map(|x| (x - top).exp()).sum();
        for (e, x) in o.iter_mut().enumerate() {
            let sum: f64 = (0..l_k).map(|j| (s[j] - top).exp() * v[(keys + j) * d_v + e] as f64).sum();
            *x = (sum / total) as f32;
        }
    }
}
