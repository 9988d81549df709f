//! `architectures` and `auto_map`: the Python class that wrote the checkpoint.
//!
//! A class decides which layers follow the transformer; an unknown class could have anything there: a projection, a
//! head for every token, another attention. So unknown classes are rejected. The same holds for code in the repository
//! (`auto_map`), which is never executed here: for some repositories it is known what it computes.

use serde_json::Value;

use crate::model::fields::{JsonFields, shown};

/// Kind of a class, by the layers after the transformer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) enum ClassKind {
    /// None, or a pooler.
    Base,
    /// Masked-language-model head of an encoder.
    MaskedLm,
    /// Causal-language-model head of a decoder.
    CausalLm,
    /// Classification head for a text or a pair.
    SequenceClassification,
}

/// Prefixes of the class names of each family.
const FAMILIES: &[(&str, &[&str])] = &[
    ("bert", &["Bert", "JinaBert"]),
    ("roberta", &["Roberta"]),
    ("xlm-roberta", &["XLMRoberta"]),
    ("camembert", &["Camembert"]),
    ("distilbert", &["DistilBert"]),
    ("mpnet", &["MPNet"]),
    ("electra", &["Electra"]),
    ("modernbert", &["ModernBert"]),
    ("nomic_bert", &["NomicBert"]),
    ("mistral", &["Mistral"]),
    ("llama", &["Llama"]),
    ("qwen2", &["Qwen2"]),
    ("qwen3", &["Qwen3"]),
    ("gemma2", &["Gemma2"]),
    ("gemma3_text", &["Gemma3Text", "Gemma3"]),
];

/// Suffixes of class names.
const ENDS: [(&str, ClassKind); 5] = [
    ("Model", ClassKind::Base),
    ("ForMaskedLM", ClassKind::MaskedLm),
    ("ForPreTraining", ClassKind::MaskedLm),
    ("ForCausalLM", ClassKind::CausalLm),
    ("ForSequenceClassification", ClassKind::SequenceClassification),
];

/// Python modules of repositories whose classes compute the same as the classes with the same names in the table above.
const MODULES: &[(&str, &[&str])] = &[
    ("bert", &["configuration_bert", "modeling_bert"]),
    ("nomic_bert", &["configuration_hf_nomic_bert", "modeling_hf_nomic_bert"]),
    ("qwen2", &["modeling_qwen"]),
];

/// Reads both keys of a config.json of this family; `None` if `architectures` is absent.
pub(in crate::model) fn read(fields: &mut JsonFields<'_>, family: &str) -> Option<ClassKind> {
    auto_map(fields, family);
    let given = fields.optional("architectures")?;
    let classes = given.as_array().map_or(&[][..], Vec::as_slice);
    let [class] = classes else {
        fields.problem(format!("`architectures` = {} is not a list of one class", shown(given)));
        return None;
    };
    let known = class.as_str().and_then(|class| kind(family, class));
    if known.is_none() {
        let begins = prefixes(family).join(" or ");
        let ends = if is_decoder(family) { "ForCausalLM" } else { "ForMaskedLM" };
        fields.problem(format!(
            "`architectures` = {} is not supported for `model_type` = {family}; {begins} followed by Model, {ends} or \
             ForSequenceClassification are",
            shown(class)
        ));
    }
    if let Some("JinaBert") = class.as_str().and_then(|class| prefix(family, class)) {
        let distances = fields.get("position_embedding_type").and_then(Value::as_str);
        if distances != Some("alibi") {
            fields.problem("`position_embedding_type` of a JinaBert must be alibi".to_owned());
        }
    }
    known
}

fn prefixes(family: &str) -> &'static [&'static str] {
    FAMILIES.iter().find(|(name, _)| *name == family).map_or(&[], |(_, prefixes)| prefixes)
}

fn prefix(family: &str, class: &str) -> Option<&'static str> {
    prefixes(family)
        .iter()
        .copied()
        .find(|prefix| ENDS.iter().any(|(end, _)| class.strip_prefix(prefix) == Some(end)))
}

/// Returns whether the family consists of causal language models.
fn is_decoder(family: &str) -> bool {
    ["mistral", "llama", "qwen2", "qwen3", "gemma2", "gemma3_text"].contains(&family)
}

/// Returns the kind of a class, if it belongs to this family.
fn kind(family: &str, class: &str) -> Option<ClassKind> {
    let end = class.strip_prefix(prefix(family, class)?)?;
    let (_, kind) = ENDS.iter().find(|(known, _)| *known == end)?;
    match kind {
        ClassKind::MaskedLm if is_decoder(family) => None,
        ClassKind::CausalLm if !is_decoder(family) => None,
        kind => Some(*kind),
    }
}

fn auto_map(fields: &mut JsonFields<'_>, family: &str) {
    let Some(given) = fields.optional("auto_map") else { return };
    let modules = MODULES.iter().find(|(name, _)| *name == family).map_or(&[][..], |(_, modules)| modules);
    let known = |reference: &str| {
        // `owner/name--module.Class`, or without the repository if it is the model's own.
        let local = reference.rsplit_once("--").map_or(reference, |(_, local)| local);
        let Some((module, class)) = local.split_once('.') else { return false };
        let is_configuration =
            prefixes(family).iter().any(|prefix| class.strip_prefix(prefix) == Some("Config"));
        modules.contains(&module) && (is_configuration || kind(family, class).is_some())
    };
    let unknown = given.as_object().map(|map| {
        map.iter().find(|(_, reference)| !reference.is_null() && !reference.as_str().is_some_and(known))
    });
    match unknown {
        Some(None) => {}
        Some(Some((key, reference))) => {
            fields.problem(format!(
                "`auto_map` has `{key}` = {}, which is code that comes with the model; it is not executed, and its \
                 results are unknown; use a model whose class is part of transformers",
                shown(reference)
            ));
            return;
        }
        None => {
            fields.problem(format!("`auto_map` = {} is not an object", shown(given)));
            return;
        }
    }
    // The code of gte-Qwen2 attends to both sides by default, transformers to the preceding tokens only.
    if family == "qwen2" && !fields.has("is_causal") {
        fields.problem(
            "`auto_map` names code that attends to both sides by default, but transformers attends to one, and \
             `is_causal` is absent; set `is_causal` to the value that the model was trained with"
                .to_owned(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_belong_to_their_family() {
        use ClassKind::{Base, CausalLm, MaskedLm, SequenceClassification};
        for (family, class, expected) in [
            ("bert", "BertModel", Some(Base)),
            ("bert", "JinaBertForMaskedLM", Some(MaskedLm)),
            ("bert", "BertForPreTraining", Some(MaskedLm)),
            ("bert", "BertForTokenClassification", None),
            ("bert", "RobertaModel", None),
            ("bert", "BertLMHeadModel", None),
            ("xlm-roberta", "XLMRobertaForSequenceClassification", Some(SequenceClassification)),
            ("qwen3", "Qwen3ForCausalLM", Some(CausalLm)),
            ("qwen3", "JinaForRanking", None),
            ("qwen3", "Qwen3ForMaskedLM", None),
            ("bert", "BertForCausalLM", None),
            ("gemma3_text", "Gemma3ForCausalLM", Some(CausalLm)),
            ("gemma3_text", "Gemma3TextModel", Some(Base)),
        ] {
            assert_eq!(kind(family, class), expected, "{family} {class}");
        }
    }
}
