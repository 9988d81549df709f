//! Prompts that are prepended to texts.
//!
//! Instruction-tuned models were trained with a prompt before each text (`query: `, `Represent this sentence for
//! searching relevant passages: `), and their configuration names them. A prompt is prepended to the text and tokenized
//! with it, as in sentence-transformers, so its tokens count in `usage` and towards the model's limit.

use std::collections::BTreeMap;

use crate::refusal::Refusal;

/// Prompt that a request selects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PromptChoice {
    /// The default of the model's configuration, if there is one.
    #[default]
    Default,
    /// The prompt with this name.
    Named(String),
    /// The prompt for texts of this role, or the default where the model has none for it.
    For(Role),
}

/// Role of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A search query.
    Query,
    /// A document to search.
    Document,
    /// A text to classify.
    Classification,
    /// A text to cluster.
    Clustering,
    /// A text to compare with others of its kind.
    Similarity,
}

impl Role {
    /// Returns the names that models use for the prompt of this role: those that sentence-transformers' `encode_query`
    /// and `encode_document` try, and Cohere's terms.
    fn names(self) -> &'static [&'static str] {
        match self {
            Role::Query => &["query", "search_query", "retrieval.query"],
            Role::Document => &["document", "passage", "corpus", "search_document", "retrieval.passage"],
            Role::Classification => &["classification"],
            Role::Clustering => &["clustering", "separation"],
            Role::Similarity => &["text-matching", "STS", "similarity"],
        }
    }
}

impl PromptChoice {
    /// Returns the prompt, from the model's prompts `by_name` and the name of its `default`; `None` if there is none.
    pub fn resolve<'a>(
        &self,
        by_name: &'a BTreeMap<String, String>,
        default: Option<&str>,
    ) -> Result<Option<&'a str>, Refusal> {
        let named = |name: &str| by_name.get(name).map(String::as_str);
        let prompt = match self {
            PromptChoice::Default => default.and_then(named),
            PromptChoice::Named(name) => match named(name) {
                Some(prompt) => Some(prompt),
                None => return Err(Refusal::no_such_prompt(name, by_name.keys().map(String::as_str))),
            },
            PromptChoice::For(role) => {
                role.names().iter().find_map(|name| named(name)).or_else(|| default.and_then(named))
            }
        };
        Ok(prompt.filter(|prompt| !prompt.is_empty()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_selected_by_name_by_role_or_by_default() {
        let prompts = |names: &[&str]| -> BTreeMap<String, String> {
            names.iter().map(|name| ((*name).to_owned(), format!("{name}: "))).collect()
        };
        let check = |names: &[&str], default: Option<&str>, choice: PromptChoice, expected: Option<&str>| {
            assert_eq!(choice.resolve(&prompts(names), default), Ok(expected), "{names:?} {choice:?}");
        };
        let named = |name: &str| PromptChoice::Named(name.to_owned());
        let (query, document) = (PromptChoice::For(Role::Query), PromptChoice::For(Role::Document));
        check(&["query", "s2s"], None, named("s2s"), Some("s2s: "));
        check(&["query", "s2s"], None, PromptChoice::Default, None);
        check(&["query", "s2s"], Some("s2s"), PromptChoice::Default, Some("s2s: "));
        check(&["query", "passage"], None, query.clone(), Some("query: "));
        check(&["query", "passage"], None, document.clone(), Some("passage: "));
        check(&["query"], None, document.clone(), None);
        check(&["query"], Some("query"), document, Some("query: "));
        check(&[], None, query, None);
        let refusal = named("passage").resolve(&prompts(&["query"]), None).expect_err("no such prompt");
        assert!(refusal.message.contains("\"query\""), "{}", refusal.message);
    }

    #[test]
    fn an_empty_prompt_is_none() {
        let prompts = BTreeMap::from([("document".to_owned(), String::new())]);
        assert_eq!(PromptChoice::For(Role::Document).resolve(&prompts, None), Ok(None));
    }
}
