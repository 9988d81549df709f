//! Task of the loaded model, and the checks whether a request matches it.
//!
//! Each path needs a capability that a model has or lacks; this module alone decides it, so that every rejection states
//! the task of the model. An embedding model also ranks: by the similarity of two vectors.

use std::sync::Arc;

use replica_api::info::{TeiLabels, TeiModelType};
use replica_api::input::OverlongPolicy;
use replica_api::prompt::PromptChoice;
use replica_api::refusal::Refusal;
use replica_core::scores;

use crate::engine::{Description, Output};
use crate::model::{LabelHead, ModelDir, Pooling, Prompts, SentenceConfig};
use crate::tokenize::EncodeOptions;

/// Task of the loaded model.
pub(crate) enum Purpose {
    /// Embedding model: computes vectors.
    Embed(EmbeddingModel),
    /// Classifier: computes a number for each label; with one label it is a reranker.
    Label(ClassifierModel),
}

/// Model with a classification head.
pub(crate) struct ClassifierModel {
    pub(crate) head: LabelHead,
    /// Prompt before each text, and before the first text of a pair; a chat template contains its own.
    pub(crate) prompt: Option<Arc<str>>,
}

/// Embedding model.
pub(crate) struct EmbeddingModel {
    /// Values in a served vector; may be fewer than the engine computes.
    pub(crate) width: usize,
    /// Values in the row of a token.
    hidden: usize,
    /// Post-processing of the engine's rows.
    sentence: SentenceConfig,
    /// Whether the model has no head and no stated task, so that it could be a reranker; then it does not rank.
    is_task_ambiguous: bool,
    /// Whether the engine also outputs the rows of tokens.
    token_rows: bool,
    pooling: Pooling,
    prompts: Prompts,
    /// Whether the tokens of a prompt are included in the pooling.
    prompt_is_pooled: bool,
}

impl Purpose {
    /// Returns the task of a model on the described engine.
    pub(crate) fn of(model: &ModelDir, engine: &Description) -> Purpose {
        match &model.head {
            Some(head) => {
                let prompt = if model.template.is_some() { None } else { model.prompts.of_default() };
                let prompt = prompt.filter(|prompt| !prompt.is_empty()).map(Arc::from);
                Purpose::Label(ClassifierModel { head: head.clone(), prompt })
            }
            None => Purpose::Embed(EmbeddingModel {
                width: model.sentence.served_width(engine.width),
                hidden: engine.hidden,
                token_rows: engine.token_rows,
                sentence: model.sentence.clone(),
                is_task_ambiguous: model.is_task_ambiguous,
                pooling: model.sentence.pooling,
                prompts: model.prompts.clone(),
                prompt_is_pooled: model.sentence.include_prompt,
            }),
        }
    }

    /// Returns the embedding model, or rejects the request for `requested`.
    pub(crate) fn embedding(&self, requested: &str) -> Result<&EmbeddingModel, Refusal> {
        match self {
            Purpose::Embed(embedding) => Ok(embedding),
            Purpose::Label(_) => Err(Refusal::wrong_task(requested, &self.describe(), "a model that embeds")),
        }
    }

    /// Rejects the request for `requested` if the engine has no rows of tokens.
    pub(crate) fn token_rows(&self, requested: &str) -> Result<(), Refusal> {
        if self.embedding(requested)?.token_rows {
            return Ok(());
        }
        let is = "on an engine that was built for the rows of texts alone";
        Err(Refusal::wrong_task(requested, is, "an engine with the rows of tokens"))
    }

    /// Returns the classifier, or rejects the request for `requested`.
    pub(crate) fn labels(&self, requested: &str) -> Result<&ClassifierModel, Refusal> {
        match self {
            Purpose::Label(classifier) => Ok(classifier),
            Purpose::Embed(_) => {
                Err(Refusal::wrong_task(requested, &self.describe(), "a model with a classification head"))
            }
        }
    }

    /// Returns how the model ranks, or rejects the request for `requested`.
    pub(crate) fn ranker(&self, requested: &str) -> Result<Ranker<'_>, Refusal> {
        match self {
            Purpose::Embed(embedding) if embedding.is_task_ambiguous => Err(Refusal::wrong_task(
                requested,
                "a language model without a head, whose configuration does not state its task",
                "a deployment with `task` set: rerank if the model judges pairs by its chat template, embed if its \
                 vectors are compared",
            )),
            Purpose::Embed(embedding) => Ok(Ranker::Similarity(embedding)),
            Purpose::Label(classifier) if classifier.ranks() => Ok(Ranker::CrossEncoder(classifier)),
            Purpose::Label(_) => Err(Refusal::wrong_task(
                requested,
                &self.describe(),
                "a reranker (one label) or a model that embeds",
            )),
        }
    }

    fn describe(&self) -> String {
        match self {
            Purpose::Embed(_) => "one that embeds".to_owned(),
            Purpose::Label(classifier) if classifier.ranks() => "a reranker (one label)".to_owned(),
            Purpose::Label(ClassifierModel { head, .. }) => {
                format!("a classifier of {} labels", head.labels.len())
            }
        }
    }

    /// Returns `task` as deployments spell it.
    pub(crate) fn task(&self) -> &'static str {
        match self {
            Purpose::Embed(_) => "embed",
            Purpose::Label(classifier) if classifier.ranks() => "rerank",
            Purpose::Label(_) => "classify",
        }
    }

    /// Returns the reranking method, for `/info`.
    pub(crate) fn rerank(&self) -> &'static str {
        match self.ranker("") {
            Ok(Ranker::CrossEncoder(_)) => "cross-encoder",
            Ok(Ranker::Similarity(_)) => "similarity",
            Err(_) => "none",
        }
    }

    /// Returns the number of values in a served vector of an embedding model.
    pub(crate) fn dimensions(&self) -> Option<usize> {
        match self {
            Purpose::Embed(embedding) => Some(embedding.width),
            Purpose::Label(_) => None,
        }
    }

    /// Returns the labels of a classifier.
    pub(crate) fn label_names(&self) -> &[String] {
        match self {
            Purpose::Embed(_) => &[],
            Purpose::Label(ClassifierModel { head, .. }) => &head.labels,
        }
    }

    /// Returns the prompts of an embedding model.
    pub(crate) fn prompts(&self) -> Option<&Prompts> {
        match self {
            Purpose::Embed(embedding) => Some(&embedding.prompts),
            Purpose::Label(_) => None,
        }
    }

    /// Returns the pooling of an embedding model, as TEI spells it.
    pub(crate) fn pooling(&self) -> Option<&'static str> {
        match self {
            Purpose::Embed(embedding) => Some(name(embedding.pooling)),
            Purpose::Label(_) => None,
        }
    }

    /// Returns the model type, as TEI reports it.
    pub(crate) fn tei_model_type(&self) -> TeiModelType {
        match self {
            Purpose::Embed(embedding) => {
                TeiModelType::Embedding { pooling: name(embedding.pooling).to_owned() }
            }
            Purpose::Label(classifier) if classifier.ranks() => {
                TeiModelType::Reranker(TeiLabels::new(&classifier.head.labels))
            }
            Purpose::Label(ClassifierModel { head, .. }) => {
                TeiModelType::Classifier(TeiLabels::new(&head.labels))
            }
        }
    }
}

/// Name of a pooling in TEI's `/info`, or in sentence-transformers where TEI has none.
fn name(pooling: Pooling) -> &'static str {
    match pooling {
        Pooling::Mean => "mean",
        Pooling::Cls => "cls",
        Pooling::LastToken => "last_token",
        Pooling::WeightedMean => "weightedmean",
        Pooling::Max => "max",
        Pooling::MeanSqrtLength => "mean_sqrt_len_tokens",
    }
}

/// Reranking method of a model.
pub(crate) enum Ranker<'a> {
    /// Reads query and document together.
    CrossEncoder(&'a ClassifierModel),
    /// Computes a vector of each; the score is their cosine.
    Similarity(&'a EmbeddingModel),
}

impl ClassifierModel {
    /// Returns whether the model has exactly one label, which scores the match of a pair.
    pub(crate) fn ranks(&self) -> bool {
        self.head.labels.len() == 1
    }

    /// Returns the tokenizer options for the texts of a request.
    pub(crate) fn options(&self, overlong: OverlongPolicy) -> EncodeOptions {
        EncodeOptions { prompt: self.prompt.clone(), overlong, most: None }
    }
}

impl EmbeddingModel {
    /// Returns the number of values in a row of this output.
    pub(crate) fn width_of(&self, output: Output) -> usize {
        match output {
            Output::Pooled => self.width,
            Output::Tokens => self.hidden,
        }
    }

    /// Returns a function that converts the engine's rows (first argument) of a width (second argument) into rows of
    /// `keep` values. `normalize` is the setting of the request or the replica; absent = as the model does it.
    pub(crate) fn finish(
        &self,
        output: Output,
        keep: usize,
        normalize: Option<bool>,
    ) -> impl FnOnce(Vec<f32>, usize) -> Vec<f32> + Send + 'static {
        let (sentence, served) = (self.sentence.clone(), self.width_of(output));
        move |rows, width| {
            let own = normalize.is_none() && output == Output::Pooled;
            let (rows, width) = if own { (sentence.serve(rows, width), served) } else { (rows, width) };
            let mut rows = scores::shorten(rows, width, keep);
            // A truncated vector is normalized again.
            let renormalize = sentence.normalize && (!own || keep < served);
            if normalize.unwrap_or(renormalize) {
                scores::normalize(&mut rows, keep);
            }
            rows
        }
    }

    /// Returns the prompt before each text of a request.
    pub(crate) fn prompt(&self, choice: &PromptChoice) -> Result<Option<Arc<str>>, Refusal> {
        let Prompts { by_name, default } = &self.prompts;
        match choice.resolve(by_name, default.as_deref())? {
            Some(prompt) if self.prompt_is_pooled => Ok(Some(Arc::from(prompt))),
            // Tokens of the prompt would have to be computed and then left out of the pooling, which the engine cannot
            // do; omitting the prompt would silently compute a different vector.
            Some(_) => Err(Refusal::invalid(
                "prompt_name",
                "prompt_name",
                "or its default selects a prompt that this model excludes from pooling (`include_prompt` is false), \
                 which is not supported",
                "token ids",
            )),
            None => Ok(None),
        }
    }
}
