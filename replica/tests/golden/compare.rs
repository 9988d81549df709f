//! Comparison of rows of numbers.

/// Returns the larger number; a NaN is larger than any number.
pub(crate) fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

/// Returns false if the value is a NaN.
pub(crate) fn within(value: f64, tolerance: f64) -> bool {
    value <= tolerance
}

/// Returns the largest magnitude.
pub(crate) fn size(row: &[f32]) -> f64 {
    row.iter().map(|number| f64::from(number.abs())).fold(0.0, larger)
}

/// Returns the largest difference, relative to `size`.
pub(crate) fn difference(found: &[f32], expected: &[f32], size: f64) -> f64 {
    assert_eq!(found.len(), expected.len());
    let distances = found.iter().zip(expected).map(|(f, w)| f64::from(f - w).abs());
    distances.fold(0.0, larger) / size
}
