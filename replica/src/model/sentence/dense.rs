//! Dense module (`2_Dense`): a linear layer after the pooling, with its own weights.

use std::path::Path;

use serde_json::{Map, Value};

use crate::model::fields::JsonFields;
use crate::model::{ModelCheckpoint, ModelError, json};

/// Linear layer that is applied to the pooled vector.
#[derive(Clone, Debug)]
pub struct Dense {
    /// Number of inputs.
    pub inputs: usize,
    /// Number of outputs.
    pub outputs: usize,
    /// Whether it adds [`Dense::BIAS`].
    pub bias: bool,
    /// Activation of the outputs.
    pub activation: DenseActivation,
    /// Weights: [`Dense::WEIGHT`] and, if there is one, the bias, with validated shapes.
    pub checkpoint: ModelCheckpoint,
}

/// Activation of a dense layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenseActivation {
    /// Identity function.
    Identity,
    /// Hyperbolic tangent.
    Tanh,
    /// `max(x, 0)`.
    Relu,
    /// `x·Φ(x)`, exact (error function).
    Gelu,
}

/// Name of the module's input and output.
const VECTOR: &str = "sentence_embedding";

impl Dense {
    /// Name of the weight tensor, with a row of inputs per output.
    pub const WEIGHT: &str = "linear.weight";
    /// Name of the bias tensor.
    pub const BIAS: &str = "linear.bias";

    /// Reads the folder of the module, whose input width must be `inputs`, the output width of the module before it.
    pub(super) fn read(folder: &Path, inputs: usize) -> Result<Dense, ModelError> {
        let path = folder.join("config.json");
        let raw: Map<String, Value> = json(&path)?;
        let DenseShape { outputs, bias, activation } = parse(&raw, inputs)
            .map_err(|problems| ModelError::Content { path: path.clone(), problem: problems.join("; ") })?;
        let checkpoint = ModelCheckpoint::open(folder)?;
        let deciding = |error: ModelError| {
            error.decided_by("config.json of the same folder", &["in_features", "out_features", "bias"])
        };
        checkpoint.tensor(Dense::WEIGHT, &[outputs, inputs]).map_err(deciding)?;
        if bias {
            checkpoint.tensor(Dense::BIAS, &[outputs]).map_err(deciding)?;
        }
        let known = |name: &str| name == Dense::WEIGHT || bias && name == Dense::BIAS;
        checkpoint.refuse_others(known).map_err(deciding)?;
        Ok(Dense { inputs, outputs, bias, activation, checkpoint })
    }
}

/// Content of the file.
struct DenseShape {
    outputs: usize,
    bias: bool,
    activation: DenseActivation,
}

/// Supported classes of PyTorch. sentence-transformers replaces unknown classes by its default; they are rejected here.
const ACTIVATIONS: [(&str, DenseActivation); 4] = [
    ("torch.nn.modules.linear.Identity", DenseActivation::Identity),
    ("torch.nn.modules.activation.Tanh", DenseActivation::Tanh),
    ("torch.nn.modules.activation.ReLU", DenseActivation::Relu),
    ("torch.nn.modules.activation.GELU", DenseActivation::Gelu),
];

fn parse(raw: &Map<String, Value>, inputs: usize) -> Result<DenseShape, Vec<String>> {
    let mut fields = JsonFields::new(raw);
    let given = fields.size("in_features");
    if given != inputs {
        fields.problem(format!("`in_features` = {given}, but the module before it outputs {inputs} numbers"));
    }
    fields.optional("module_output_name");
    for key in ["module_input_name", "module_output_name"] {
        if let Some(name) = fields.word(key).filter(|name| *name != VECTOR) {
            fields.problem(format!("`{key}` = {name} is not supported for a dense layer; {VECTOR} is"));
        }
    }
    fields.must_be("use_residual", false, "residual connections are not implemented");
    let function = fields.word("activation_function");
    let known = ACTIVATIONS.iter().find(|(name, _)| function == Some(*name));
    let activation = match (function, known) {
        (_, Some((_, activation))) => *activation,
        (None, None) => DenseActivation::Tanh,
        (Some(other), None) => {
            let known: Vec<&str> = ACTIVATIONS.iter().map(|(name, _)| *name).collect();
            fields
                .problem(format!("`activation_function` {other} is not supported; {} are", known.join(", ")));
            DenseActivation::Tanh
        }
    };
    let (outputs, bias) = (fields.size("out_features"), fields.flag("bias", true));
    fields.refuse_others();
    fields.finish(DenseShape { outputs, bias, activation })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const WEIGHTS: &str = r#"{"linear.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "linear.bias": {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]}}"#;

    /// Reads a configuration with additional keys, after a module with `inputs` outputs.
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
    fn activation_and_bias_are_read() {
        let plain = check(r#", "out_features": 2"#, 3).unwrap();
        assert_eq!((plain.outputs, plain.bias, plain.activation), (2, true, DenseActivation::Tanh));
        for (name, activation) in [
            ("linear.Identity", DenseActivation::Identity),
            ("activation.Tanh", DenseActivation::Tanh),
            ("activation.ReLU", DenseActivation::Relu),
            ("activation.GELU", DenseActivation::Gelu),
        ] {
            let keys = format!(
                r#", "out_features": 2, "activation_function": "torch.nn.modules.{name}",
                "module_input_name": "sentence_embedding""#
            );
            let dense = check(&keys, 3).unwrap();
            assert_eq!((dense.bias, dense.activation), (true, activation));
        }
    }

    #[test]
    fn mismatched_sizes_and_unsupported_values_are_rejected() {
        for (keys, inputs, sentence) in [
            (r#", "out_features": 2"#, 4, "`in_features` = 3, but the module before it outputs 4 numbers"),
            (r#", "out_features": 5"#, 3, "tensor `linear.weight` has the shape [2, 3], expected [5, 3]"),
            (
                r#", "out_features": 2, "module_input_name": "token_embeddings""#,
                3,
                "`module_input_name` = token_embeddings is not supported for a dense layer",
            ),
            (r#", "out_features": 2, "use_residual": true"#, 3, "`use_residual` = true is not supported"),
            (
                r#", "out_features": 2, "activation_function": "torch.nn.modules.activation.PReLU""#,
                3,
                "`activation_function` torch.nn.modules.activation.PReLU is not supported",
            ),
            ("", 3, "`out_features` is missing"),
            (r#", "out_features": 2, "bias": false, "made_up": 1"#, 3, "`made_up` = 1 is not understood"),
            (r#", "out_features": 2, "bias": false"#, 3, "tensor `linear.bias` is not used by the model"),
        ] {
            let error = check(keys, inputs).unwrap_err();
            assert!(error.contains(sentence), "{error}");
        }
    }
}
