//! What stands before a text.
//!
//! Instruction-tuned models were trained with a prompt before each text (`query: `, `Represent this sentence for
//! searching relevant passages: `), and their configuration names them. A prompt is put before the text and tokenised
//! with it, as sentence-transformers does it, so its tokens count in `usage` and towards the model's limit.

use std::collections::BTreeMap;

use crate::refusal::Refusal;

/// Which prompt a request wants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PromptChoice {
    /// The one that the model's configuration calls its default, if there is one.
    #[default]
    Default,
    /// The one of this name.
    Named(String),
    /// The one for such texts, or the default where the model makes no difference.
    For(Role),
}

/// What a text is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// What is searched for.
    Query,
    /// What is found.
    Document,
    /// What is classified.
    Classification,
    /// What is grouped.
    Clustering,
    /// What is compared with others of its kind.
    Similarity,
}

impl Role {
    /// What models call the prompt for it: the names that sentence-transformers' `encode_query` and `encode_document`
    /// try, and Cohere's words.
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
    /// The prompt, from those that the model has `by_name` and the name of its `default`; `None` if nothing stands
    /// before the text.
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
    fn a_prompt_is_found_by_its_name_by_what_the_text_is_or_by_default() {
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
