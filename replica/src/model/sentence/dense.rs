//! `2_Dense`: a linear layer behind the pooling, with weights of its own.

use std::path::Path;

use serde::Deserialize;

use crate::model::{Checkpoint, ModelError, json};

/// A linear layer that is applied to the pooled vector.
#[derive(Clone, Debug)]
pub struct Dense {
    /// Numbers that it takes.
    pub inputs: usize,
    /// Numbers that it makes.
    pub outputs: usize,
    /// Whether it adds [`Dense::BIAS`].
    pub bias: bool,
    /// What is done to each of its numbers.
    pub activation: DenseActivation,
    /// Holds [`Dense::WEIGHT`] and, if there is one, the bias, in the shapes that the sizes say.
    pub checkpoint: Checkpoint,
}

/// What is done to each number behind a dense layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenseActivation {
    /// Nothing.
    Identity,
    /// The hyperbolic tangent.
    Tanh,
    /// `max(x, 0)`.
    Relu,
    /// `x·Φ(x)`, by the error function.
    Gelu,
}

#[derive(Deserialize)]
struct RawDense {
    in_features: usize,
    out_features: usize,
    bias: Option<bool>,
    activation_function: Option<String>,
    module_input_name: Option<String>,
    module_output_name: Option<String>,
    #[serde(default)]
    use_residual: bool,
}

/// What the stage passes on.
const VECTOR: &str = "sentence_embedding";

impl Dense {
    /// The tensor of the weights, a row of inputs per output.
    pub const WEIGHT: &str = "linear.weight";
    /// The tensor of the bias.
    pub const BIAS: &str = "linear.bias";

    /// Reads the folder of the stage, which must take the `inputs` numbers that the stage before it makes.
    pub(super) fn read(folder: &Path, inputs: usize) -> Result<Dense, ModelError> {
        let path = folder.join("config.json");
        let raw: RawDense = json(&path)?;
        let refuse = |problem: String| Err(ModelError::Content { path: path.clone(), problem });
        if raw.in_features != inputs {
            return refuse(format!(
                "`in_features` = {} and the stage before it makes {inputs} numbers",
                raw.in_features
            ));
        }
        for name in [&raw.module_input_name, &raw.module_output_name] {
            if let Some(name) = name.as_ref().filter(|name| *name != VECTOR) {
                return refuse(format!("a dense layer on {name} is not supported; on {VECTOR} is"));
            }
        }
        if raw.use_residual {
            return refuse("`use_residual` = true is not supported".to_owned());
        }
        let activation = match raw.activation_function.as_deref().map(class) {
            Some("Identity") => DenseActivation::Identity,
            None | Some("Tanh") => DenseActivation::Tanh,
            Some("ReLU") => DenseActivation::Relu,
            Some("GELU") => DenseActivation::Gelu,
            Some(other) => {
                return refuse(format!(
                    "`activation_function` {other} is not supported; Identity, Tanh, ReLU and GELU are"
                ));
            }
        };
        let (outputs, bias) = (raw.out_features, raw.bias.unwrap_or(true));
        let checkpoint = Checkpoint::open(folder)?;
        checkpoint.tensor(Dense::WEIGHT, &[outputs, inputs])?;
        if bias {
            checkpoint.tensor(Dense::BIAS, &[outputs])?;
        }
        Ok(Dense { inputs, outputs, bias, activation, checkpoint })
    }
}

/// `torch.nn.modules.activation.Tanh` is a Tanh.
fn class(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const WEIGHTS: &str = r#"{"linear.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "linear.bias": {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]}}"#;

    /// What is made of a configuration with these keys more, behind a stage that makes `inputs` numbers.
    fn check(keys: &str, inputs: usize) -> Result<Dense, String> {
        let folder = tempfile::tempdir().unwrap();
        let config = format!(r#"{{"in_features": 3{keys}}}"#);
        fs::write(folder.path().join("config.json"), config).unwrap();
        let mut weights = (WEIGHTS.len() as u64).to_le_bytes().to_vec();
        weights.extend(WEIGHTS.as_bytes());
        weights.extend([0; 32]);
        fs::write(folder.path().join("model.safetensors"), weights).unwrap();
        Dense::read(folder.path(), inputs).map_err(|error| error.to_string())
    }

    #[test]
    fn what_the_numbers_depend_on_is_read() {
        let plain = check(r#", "out_features": 2"#, 3).unwrap();
        assert_eq!((plain.outputs, plain.bias, plain.activation), (2, true, DenseActivation::Tanh));
        for (name, activation) in [
            ("linear.Identity", DenseActivation::Identity),
            ("activation.Tanh", DenseActivation::Tanh),
            ("activation.ReLU", DenseActivation::Relu),
            ("activation.GELU", DenseActivation::Gelu),
        ] {
            let keys = format!(
                r#", "out_features": 2, "bias": false, "activation_function": "torch.nn.modules.{name}",
                "module_input_name": "sentence_embedding""#
            );
            let dense = check(&keys, 3).unwrap();
            assert_eq!((dense.bias, dense.activation), (false, activation));
        }
    }

    #[test]
    fn what_does_not_fit_or_is_not_built_is_refused() {
        for (keys, inputs, sentence) in [
            (r#", "out_features": 2"#, 4, "`in_features` = 3 and the stage before it makes 4 numbers"),
            (
                r#", "out_features": 5"#,
                3,
                "tensor `linear.weight` has the shape [2, 3] and should have [5, 3]",
            ),
            (
                r#", "out_features": 2, "module_input_name": "token_embeddings""#,
                3,
                "a dense layer on token_embeddings is not supported",
            ),
            (r#", "out_features": 2, "use_residual": true"#, 3, "`use_residual` = true is not supported"),
            (
                r#", "out_features": 2, "activation_function": "torch.nn.modules.activation.PReLU""#,
                3,
                "`activation_function` PReLU is not supported",
            ),
            ("", 3, "missing field `out_features`"),
        ] {
            let error = check(keys, inputs).unwrap_err();
            assert!(error.contains(sentence), "{error}");
        }
    }
}
