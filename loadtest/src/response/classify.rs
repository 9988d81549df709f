//! Validation of classification responses in vLLM's format: for each text the best label, and the probability of each label.

use serde::Deserialize;

use super::{ResponseDefect, kind};

#[derive(Deserialize)]
struct ClassifiedTexts {
    data: Vec<ClassifiedText>,
}

#[derive(Deserialize)]
struct ClassifiedText {
    index: usize,
    #[serde(rename = "label")]
    _label: String,
    /// JavaScript serializes NaN as `null`.
    probs: Vec<Option<f32>>,
    num_classes: usize,
}

/// Validates a response to `inputs` texts; returns the number of labels.
pub(crate) fn check(body: &[u8], inputs: usize) -> Result<usize, ResponseDefect> {
    let ClassifiedTexts { data } = serde_json::from_slice(body).map_err(|error| kind(&error))?;
    if data.len() != inputs {
        return Err(ResponseDefect::WrongCount);
    }
    let labels = data.first().map_or(0, |text| text.probs.len());
    for (position, ClassifiedText { index, _label: _, probs, num_classes }) in data.iter().enumerate() {
        if *index != position {
            return Err(ResponseDefect::WrongOrder);
        }
        if probs.is_empty() || probs.len() != labels || *num_classes != labels {
            return Err(ResponseDefect::WrongDimensions);
        }
        if !probs.iter().all(|probability| probability.is_some_and(f32::is_finite)) {
            return Err(ResponseDefect::NotFinite);
        }
    }
    Ok(labels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_has_a_label_and_a_finite_probability_of_each() {
        let response = |texts: &[(usize, &str, usize)]| {
            let texts: Vec<String> = texts
                .iter()
                .map(|(index, probs, classes)| {
                    format!(r#"{{"index":{index},"label":"yes","probs":{probs},"num_classes":{classes}}}"#)
                })
                .collect();
            format!(r#"{{"id":"x","object":"list","data":[{}],"usage":{{}}}}"#, texts.join(","))
        };
        let good = response(&[(0, "[0.25,0.75]", 2), (1, "[1,0]", 2)]);
        assert_eq!(check(good.as_bytes(), 2), Ok(2));
        for (wrong, expected) in [
            (response(&[(0, "[0.5]", 1)]), ResponseDefect::WrongCount),
            (response(&[(1, "[1]", 1), (0, "[1]", 1)]), ResponseDefect::WrongOrder),
            (response(&[(0, "[1]", 1), (1, "[1,0]", 2)]), ResponseDefect::WrongDimensions),
            (response(&[(0, "[1]", 1), (1, "[1]", 2)]), ResponseDefect::WrongDimensions),
            (response(&[(0, "[]", 0), (1, "[]", 0)]), ResponseDefect::WrongDimensions),
            (response(&[(0, "[1]", 1), (1, "[null]", 1)]), ResponseDefect::NotFinite),
            (response(&[(0, "[1]", 1), (1, "[1e39]", 1)]), ResponseDefect::NotFinite),
            (good[..good.len() - 2].to_owned(), ResponseDefect::NotJson),
            (good.replace("\"label\":\"yes\",", ""), ResponseDefect::WrongShape),
            ("{\"data\":[[{\"label\":\"yes\",\"score\":1}]]}".to_owned(), ResponseDefect::WrongShape),
        ] {
            assert_eq!(check(wrong.as_bytes(), 2), Err(expected), "{wrong}");
        }
    }
}
